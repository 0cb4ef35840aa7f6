"""Work known in advance: cuts by work, limits, and the loop that learns seconds per work."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbbsp_core import (
    Affine,
    Balancer,
    EpochBalanced,
    Even,
    FixedShares,
    GlobalOrder,
    LastValue,
    LeaderStraggler,
    Limits,
    LoadBalanced,
    Observation,
    ProportionalControl,
    SessionOptions,
    SingleWorker,
    WorkerSession,
    read_run,
)
from lbbsp_core.order import make_order
from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_core.runtime.loop.session_state import own_state, restored_state
from lbbsp_core.runtime.loop.start import agree
from lbbsp_core.runtime.planning.bounds import BatchBounds
from lbbsp_core.runtime.record.record import run_header
from lbbsp_core.runtime.record.writer import open_record
from lbbsp_core.sampled_order import SampledOrder
from lbbsp_core.testing import exchange_in_process
from lbbsp_core.work import UNITS, StepShares, Work

amounts = st.one_of(st.floats(0.01, 100.0), st.integers(1, 5).map(float))


@st.composite
def steps(draw: st.DrawFn) -> tuple[Work, tuple[int, ...]]:
    """Work of the samples of a step, and a plan of positive shares."""
    plan = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    values = draw(st.lists(amounts, min_size=sum(plan), max_size=sum(plan)))
    return Work(values, len(values)), tuple(plan)


@st.composite
def limited(draw: st.DrawFn) -> tuple[Work, tuple[int, ...], list[Limits], int]:
    """A small step with limits, which may be impossible to keep, and a granularity."""
    plan = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    values = draw(st.lists(st.floats(0.2, 5.0), min_size=sum(plan), max_size=sum(plan)))
    limits = []
    for _ in plan:
        minimum = draw(st.integers(0, 3))
        maximum = draw(st.none() | st.integers(minimum, 8))
        limits.append(Limits(minimum, maximum, draw(st.none() | st.floats(0.5, 20.0))))
    return Work(values, len(values)), tuple(plan), limits, draw(st.integers(1, 3))


def keeps(work: Work, sizes: tuple[int, ...], limits: list[Limits]) -> bool:
    """Whether a division keeps all limits, by the definition of each."""
    ends = np.cumsum([0, *sizes])
    for (first, last), size, bounds in zip(pairwise(ends.tolist()), sizes, limits, strict=True):
        done = int(work.units[first:last].sum())
        most = bounds.maximum_work
        if not bounds.minimum <= size <= (size if bounds.maximum is None else bounds.maximum):
            return False
        if most is not None and done > int(most / work.mean * UNITS):
            return False
    return True


# The cut of a step


@given(steps())
def test_each_part_has_its_share_of_the_work_but_for_one_sample(case):
    work, plan = case
    samples = np.arange(len(work.units))
    shares = work.cut(samples, plan, [Limits(0)] * len(plan))
    assert sum(shares.sizes) == len(samples)
    total, largest = int(work.units.sum()), int(work.units.max())
    for done, share in zip(shares.work, plan, strict=True):
        assert abs(done * UNITS - total * share / sum(plan)) <= largest + 1
    ends = np.cumsum([0, *shares.sizes])
    found = [work.units[a:b].sum() / UNITS for a, b in pairwise(ends)]
    assert list(shares.work) == found
    assert shares == work.cut(samples, plan, [Limits(0)] * len(plan)), "deterministic"


@given(limited())
def test_limits_hold_wherever_a_division_keeps_them(case):
    work, plan, limits, granularity = case
    samples, count = np.arange(len(work.units)), len(work.units)
    possible = [
        sizes
        for sizes in product(range(count + 1), repeat=len(plan))
        if sum(sizes) == count and keeps(work, sizes, limits)
    ]
    if not possible:
        with pytest.raises(ValueError, match=r"cannot be divided within .* raise maximum"):
            work.cut(samples, plan, limits, granularity)
        return
    sizes = work.cut(samples, plan, limits, granularity).sizes
    assert sum(sizes) == count
    assert keeps(work, sizes, limits)
    in_granules = any(not any(x % granularity for x in each[:-1]) for each in possible)
    assert not in_granules or not any(x % granularity for x in sizes[:-1])


def test_work_is_cut_at_the_nearest_sample():
    work = Work([1, 1, 1, 1, 4, 4], 6)
    assert work.cut(np.arange(6), (3, 3), [Limits()] * 2).sizes == (4, 2), "the first of two"
    assert work.cut(np.arange(6)[::-1], (3, 3), [Limits()] * 2).sizes == (1, 5)
    assert work.cut(np.arange(6), (4, 2), [Limits()] * 2).sizes == (5, 1)
    assert work.cut(np.arange(6), (1, 5), [Limits()] * 2).sizes == (2, 4)


def test_a_cut_that_fits_is_found_without_all_others(monkeypatch):
    monkeypatch.setattr("lbbsp_core.work._span", lambda *_: pytest.fail("slow"))
    limits = [Limits(1, 60), Limits(0, maximum_work=80.0)]
    assert Work([1.0] * 100, 100).cut(np.arange(100), (40, 60), limits).sizes == (40, 60)


def test_a_worker_at_its_largest_work_leaves_the_rest_to_all_others():
    work = Work(np.ones(120), 120)
    limits = [Limits(1, None, 15.0), Limits(), Limits(), Limits()]
    assert work.cut(np.arange(120), (30, 30, 30, 30), limits).sizes == (15, 35, 35, 35)
    last = [Limits(), Limits(), Limits(), Limits(1, None, 15.0)]
    assert work.cut(np.arange(120), (30, 30, 30, 30), last).sizes == (35, 35, 35, 15)
    samples = [Limits(1, 15), Limits(), Limits(), Limits()]
    assert work.cut(np.arange(120), (30, 30, 30, 30), samples).sizes == (15, 35, 35, 35)


def test_units_do_not_depend_on_the_unit_of_the_values():
    values = np.random.default_rng(0).lognormal(size=1000)
    assert Work(values, 1000).digest == Work(values * 512.0, 1000).digest
    assert Work(values, 1000).digest != Work(values[::-1], 1000).digest
    assert abs(Work(values, 1000).units.sum() - 1000 * UNITS) <= 1000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], r"shape \(3,\), a number for each sample of the data set, got \(2,\)"),
        ([[1.0], [2.0], [3.0]], r"got \(3, 1\)"),
        (5.0, r"got \(\)"),
        ([1.0, math.nan, 2.0], "got nan for sample 1: give an empty sample a small work"),
        ([1.0, 2.0, math.inf], "got inf for sample 2"),
        ([0.0, 1.0, 2.0], "got 0.0 for sample 0"),
        ([1.0, -1.0, 2.0], "got -1.0 for sample 1"),
        (["a", "b", "c"], "must be an array of numbers, one for each sample, got list"),
        ([[1, 2], [3], [4]], "must be an array of numbers"),
    ],
)
def test_wrong_arrays_name_the_value_and_the_remedy(values, message):
    with pytest.raises(ValueError, match=message):
        Work(values, 3)


def test_a_limit_of_work_must_be_positive():
    with pytest.raises(ValueError, match=r"Limits.maximum_work must be finite and > 0, got 0"):
        Limits(maximum_work=0)


# The loop


def team(workers: int, total: int, values: Any = None, **options: Any) -> list[Balancer]:
    """Balancers of all workers, with an order over samples of the given work."""
    found = []
    for rank in range(workers):
        one = Balancer(rank=rank, workers=workers, global_batch_size=total, **options)
        one.schedule.use_order(
            make_order(
                len(values), total, workers=workers, parts=one.bounds.parts, seed=3, work=values
            )
        )
        found.append(one)
    return found


def run(balancers: list[Balancer], seconds_per_work: list[float], steps: int) -> list[StepShares]:
    """Steps in which each worker is busy in proportion to the work that it draws."""
    found = []
    for _ in range(steps):
        step = balancers[0].step
        order = balancers[0].schedule.order
        drawn = [each.schedule.local_indices(step) for each in balancers]
        assert sorted(np.concatenate(drawn)) == sorted(order.indices(step)), "each sample once"
        (sizes,) = {each.sizes(step) for each in balancers}
        assert sizes == tuple(map(len, drawn))
        done = [float(order.work.units[samples].sum()) / UNITS for samples in drawn]
        found.append(StepShares(sizes, sizes, tuple(done)))
        busy = [slow * w for slow, w in zip(seconds_per_work, done, strict=True)]
        exchange_in_process(balancers, busy)
    return found


LENGTHS = np.random.default_rng(7).lognormal(sigma=1.0, size=4096 + 100)


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize(
    "policy",
    [LoadBalanced(), EpochBalanced(), ProportionalControl(interval=1), LeaderStraggler(window=1)],
    ids=lambda policy: type(policy).__name__,
)
def test_all_policies_find_the_speeds_per_work(policy, lag):
    """Speeds of 2 : 1 : 1; by counts, the speed of a step would differ by its samples."""
    balancers = team(3, 256, LENGTHS, policy=policy, predictor=LastValue(), lag=lag)
    shares = run(balancers, [0.01, 0.02, 0.02], 60)
    plan = balancers[0].schedule._plans[balancers[0].step][0]
    assert sum(plan) == 256
    np.testing.assert_allclose(plan, [128, 64, 64], atol=14)
    done = np.array([each.work for each in shares[20:]])
    parts = (done / done.sum(axis=1, keepdims=True)).mean(axis=0)
    np.testing.assert_allclose(parts, [0.5, 0.25, 0.25], atol=0.05)


@dataclass(frozen=True)
class Watching:
    """Even batches; keeps what it observes."""

    seen: list[Observation]
    uses_costs = is_static = needs_common_steps = accepts_narrower_limits = False

    def init(self, constraints):
        return Even().init(constraints)

    def update(self, state, constraints, observation):
        self.seen.append(observation)
        return state


def test_a_policy_observes_the_seconds_of_the_planned_work():
    seen: list[Observation] = []
    balancers = team(2, 64, LENGTHS[: 3 * 64 + 20], policy=Watching(seen))
    shares = run(balancers, [0.01, 0.03], 4)
    assert shares[0].work != (32.0, 32.0)
    for own, plan in zip(seen[::2], 3 * [(32, 32)] + [(10, 10)], strict=True):
        assert own.sizes == plan
        np.testing.assert_allclose(own.busy_seconds, [0.01 * plan[0], 0.03 * plan[1]], rtol=1e-6)


def test_limits_of_work_hold_in_short_steps():
    limits = [Limits(1, None, 12.0), Limits()]
    balancers = team(2, 16, np.ones(16 + 14), limits=limits, policy=FixedShares((0.9, 0.1)))
    assert [each.sizes for each in run(balancers, [1.0, 1.0], 2)] == [(12, 4), (12, 2)]


@settings(max_examples=12)
@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 3))
def test_short_steps_granularity_and_parts(rest, granularity, parts):
    values = LENGTHS[: 3 * 64 + rest]
    balancers = team(3, 64, values, granularity=granularity, bounds=BatchBounds(parts))
    steps = balancers[0].schedule.order.steps_per_epoch
    shares = run(balancers, [0.01, 0.02, 0.04], 2 * steps)
    for each in shares:
        assert min(each.sizes) >= parts
        assert sum(each.sizes) in (64, rest)
        if sum(each.sizes) == 64:
            assert not any(x % granularity for x in each.sizes[:-1])


def test_limits_hold_in_samples_and_in_work():
    limits = [Limits(1, 40), Limits(8), Limits(1, None, 30.0 * LENGTHS.mean())]
    balancers = team(3, 96, LENGTHS, limits=limits)
    for each in run(balancers, [0.005, 0.04, 0.01], 40):
        assert each.sizes[0] <= 40
        assert each.sizes[1] >= 8
        assert each.work[2] <= 30.0


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(1, None, 10.0), "sum of Limits.maximum_work must be at least the mean work of a"),
        ([Limits(1, None, 20.0), Limits(1, None, 30.0)], "sample 3 has the work 40, got 30"),
    ],
)
def test_limits_of_work_that_no_step_can_keep_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        team(2, 4, [1.0, 2.0, 3.0, 40.0, 1.0, 1.0, 1.0, 1.0], limits=limits)


def test_a_step_of_too_much_work_raises_on_all_workers():
    values = np.ones(64)
    values[:8] = 5.0
    balancers = team(2, 8, values, limits=Limits(1, None, 7.0))
    for each in balancers:
        each.schedule.order.shuffle = False
        with pytest.raises(ValueError, match=r"a step of 8 samples, of the work 40, cannot be"):
            each.sizes(0)


def test_a_limit_of_work_needs_the_work():
    one = Balancer(rank=0, workers=2, global_batch_size=8, limits=Limits(1, None, 100.0))
    with pytest.raises(ValueError, match=r"Limits.maximum_work needs the work of each sample"):
        one.schedule.use_order(GlobalOrder(16, 8))
    first_of_two = SimpleNamespace(rank=0, workers=2)  # the error comes before any exchange
    session = WorkerSession(
        first_of_two, 8, SessionOptions(limits=Limits(1, None, 9.0)), framework="none"
    )
    with pytest.raises(ValueError, match=r"or limit the samples by Limits\.maximum"):
        session.start({})


def test_the_record_holds_samples_work_and_the_seconds_predicted_for_it(tmp_path):
    balancers = team(2, 64, LENGTHS, predictor=LastValue(), policy=LoadBalanced(min_gain=0.0))
    header = run_header("none", workers=2, global_batch_size=64, versions={})
    record, receive = open_record(tmp_path, header), balancers[0].receive
    balancers[0].receive = lambda *step: record.write(receive(*step).line())
    shares = run(balancers, [0.01, 0.03], 30)
    lines = read_run(tmp_path).steps
    assert [(line.sizes, line.work) for line in lines] == [each[1:] for each in shares]
    for line in lines[5:]:
        np.testing.assert_allclose(line.busy_seconds, np.array(line.work) * [0.01, 0.03])
        np.testing.assert_allclose(line.predicted_seconds, line.busy_seconds, rtol=1e-6)


def test_an_overhead_is_learned_from_work():
    costs = [Affine(0.2, 0.01), Affine(0.0, 0.02)]
    balancers = team(2, 64, LENGTHS, predictor=LastValue())
    for _ in range(60):
        step = balancers[0].step
        shares = balancers[0].schedule._shares(step)
        exchange_in_process(
            balancers, [cost(w) for cost, w in zip(costs, shares.work, strict=True)]
        )
    kappas = [each._estimate.cost_shape.overhead for each in balancers]
    assert 10 < kappas[0] <= 16, "bounded by X / 2N"
    assert kappas[1] < 2


def test_a_sampler_s_epochs_are_cut_by_work_once_they_are_drawn():
    values = np.array([1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0, 9.0])
    order = SampledOrder(8, 4, 2)
    order.work = Work(values, 8)
    one = Balancer(rank=0, workers=2, global_batch_size=4)
    one.schedule.use_order(order)
    assert one.sizes(0) == (2, 2)
    order.draw(0, [3, 0, 1, 2, 7, 4, 5, 6], [4, 8])
    assert one.sizes(0) == (1, 3)


def test_a_checkpoint_continues_the_plans_also_with_other_work():
    balancers = team(2, 64, LENGTHS, predictor=LastValue())
    run(balancers, [0.01, 0.03], 10)
    for values in (LENGTHS, None):
        fresh = Balancer(rank=0, workers=2, global_batch_size=64, predictor=LastValue())
        fresh.restore(restored_state(fresh, *own_state(balancers[0])))
        fresh.schedule.use_order(make_order(len(LENGTHS), 64, workers=2, seed=3, work=values))
        plan = balancers[0].schedule._plans[10][0]
        assert fresh.schedule._plans[10] == (plan, (None, None), fresh.constraints)
        assert fresh.schedule.step_of_order(10) == 10, "the same order"
        same = fresh.sizes(10) == balancers[0].sizes(10)
        assert same == (values is not None)


def test_the_same_order_with_other_work_is_cut_anew():
    (one, _) = team(2, 64, LENGTHS)
    first = one.sizes(0)
    one.schedule.use_order(make_order(len(LENGTHS), 64, workers=2, seed=3, work=LENGTHS[::-1]))
    assert one.sizes(0) != first
    one.schedule.use_order(make_order(len(LENGTHS), 64, workers=2, seed=3))
    assert one.sizes(0) == (32, 32)
    assert one.schedule.step_of_order(0) == 0


def test_barriers_notice_other_work_after_the_handshake():
    session = PipelinedSession(SingleWorker(), 64, SessionOptions(), framework="none")
    seen = set()
    for values in (LENGTHS, LENGTHS[::-1], None):
        session.use_order(session.make_order(len(LENGTHS), seed=3, work=values))
        seen.add(session._position())
    assert len(seen) == 3
    session.close()


def test_other_work_on_a_worker_is_noticed_in_the_handshake(monkeypatch):
    seen = {}
    monkeypatch.setattr(handshake, "compare", lambda collectives, facts: seen.update(facts))
    facts = []
    for values in (LENGTHS, LENGTHS[::-1], None):
        one = Balancer(rank=0, workers=1, global_batch_size=64)
        agree(one, make_order(len(LENGTHS), 64, workers=1, work=values), SingleWorker(), {})
        facts.append(seen["work of each sample (work=)"])
    assert len(set(facts)) == 3


def test_orders_of_batches_take_no_work():
    with pytest.raises(ValueError, match="work= needs samples with numbers of their own"):
        make_order(16, 8, workers=2, by_batch=True, work=np.ones(16))


def test_limits_with_work_stay_when_the_memory_of_a_profile_is_added():
    one = Balancer(rank=0, workers=1, global_batch_size=8, limits=Limits(1, None, 50.0))
    one.set_peers([replace_max_batch(one.static_info(), 8)])
    assert one.constraints.limits == (Limits(1, 8, 50.0),)
    assert replace(Limits(1, 8, 50.0), minimum=2).maximum_work == 50.0


def replace_max_batch(row: list[int], most: int) -> list[int]:
    return [most, *row[1:]]
