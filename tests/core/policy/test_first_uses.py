"""First uses of batch sizes: what is learned from them, and what plans with new sizes cost."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from teams import team

from lbbsp_core import (
    SSP,
    Affine,
    BatchConstraints,
    Even,
    LastValue,
    Limits,
    LoadBalanced,
    Measurement,
    Mixture,
    Observation,
    Policy,
    Predictor,
    Proportional,
    ProportionalControl,
)
from lbbsp_core.cost import slowest
from lbbsp_core.policy import FirstUses
from lbbsp_core.policy.first_uses import extra_seconds, plan_of_used_sizes
from lbbsp_core.policy.load_balanced import LoadBalancedState
from lbbsp_core.runtime.planning.bounds import BatchBounds
from lbbsp_core.runtime.record.record import StepLine
from lbbsp_core.sim import SimConfig, SyntheticCluster, Timeline, run_async, run_bsp
from lbbsp_core.sim.slowdowns import Slowdowns
from lbbsp_core.sync.rounds import Rounds
from lbbsp_core.testing import exchange_in_process

SIZES = st.frozensets(st.integers(1, 12), max_size=5)


def run_steps(worker: FirstUses, *steps: tuple[int, float, float | None]) -> FirstUses:
    for step in steps:
        worker = worker.after(*step)
    return worker


def test_a_first_use_is_no_measurement_if_it_takes_longer_than_predicted() -> None:
    worker = run_steps(FirstUses(), (8, 1.0, None), (8, 1.0, 1.0), (9, 1.5, 1.0))
    assert worker.measured(8, 9.0, 1.0) == 9.0, "no first use"
    assert [worker.measured(10, s, 1.0) for s in (0.5, 1.09, 1.11, 9.0)] == [0.5, 1.09, None, None]
    assert worker.measured(10, 1.0, None) is None, "nothing tells"
    assert worker.extra == (), "the next step may tell more"
    costly = worker.after(10, 1.6, 1.0)
    assert costly.extra_seconds == 0.5
    assert costly.measured(11, 1.2, 1.0) is None


def test_where_first_uses_are_free_it_is_one_nevertheless() -> None:
    steps = (8, 1.0, None), (8, 1.0, 1.0), (9, 0.9, 1.0), (10, 1.3, 1.0), (8, 1.0, 1.0)
    free = run_steps(FirstUses(), *steps)
    assert free.extra_seconds == 0
    assert [free.measured(11, s, 1.0) for s in (1.2, 4.0)] == [1.2, 4.0]
    assert free.measured(11, 6.0, 1.0) is None, "an outlier"
    assert free.after(11, 6.0, 1.0).after(8, 1.0, 1.0).extra[-1] == 5.0
    seen = free.after(11, 6.0, 1.0, excluded=True)
    assert seen.after(8, 1.0, 1.0).extra == seen.extra


def test_a_worker_that_has_become_slower_has_no_costly_first_use() -> None:
    """Its next step with the size takes as long; one that is excluded tells nothing."""
    worker = run_steps(FirstUses(), (8, 1.0, None), (8, 1.0, 1.0), (9, 3.0, 1.0))
    worker = worker.after(9, 50.0, 1.0, excluded=True).after(9, 2.75, 1.0)
    assert (worker.extra, worker.latest) == ((0.25,), None)
    assert worker.after(9, 9.0, 1.0).extra == (0.25,)


def test_a_worker_whose_size_is_new_in_every_step_is_learned_from() -> None:
    """In every fourth step, without the usual extra time."""
    worker, measured = FirstUses(), []
    for size in range(12):
        measured.append(worker.measured(size, 3.0, 1.0))
        worker = worker.after(size, 3.0, 1.0)
    assert measured == [None, None, None, 1.0] * 3
    assert worker.measured(99, 1.5, 1.0) is None, "less than the usual extra time"


@pytest.mark.parametrize("invalid", [0.0, -1.0, math.nan, math.inf])
def test_invalid_times_are_no_measurements(invalid: float) -> None:
    worker = run_steps(FirstUses(), (8, 9.0, None), (9, 1.0, 1.0), (10, 1.0, 1.0))
    assert worker.measured(11, invalid, 1.0) is None


@example([(frozenset({3, 4}), 3), (frozenset({4, 5}), 5)], 8, 2, None)
@given(
    st.lists(st.tuples(SIZES, st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(4, 30),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([None, 9]),
)
def test_plans_of_used_sizes_are_those_of_a_search_of_all(
    workers: list[tuple[frozenset[int], int]], total: int, granularity: int, maximum: int | None
) -> None:
    bounds = (Limits(1, maximum),) * len(workers)
    constraints = BatchConstraints(total, bounds, granularity)
    costs = [Proportional(float(speed)) for _, speed in workers]
    plans = [
        plan for plan in itertools.product(*(sizes for sizes, _ in workers)) if sum(plan) == total
    ]
    known, near = [FirstUses(sizes) for sizes, _ in workers], (6,) * len(workers)
    found = plan_of_used_sizes(known, constraints, costs, near)
    if found is not None:
        assert constraints.allow(found)
        assert all(x in sizes for x, (sizes, _) in zip(found, workers, strict=True))
    if total % granularity == 0:
        allowed = [slowest(costs, plan) for plan in plans if constraints.allow(plan)]
        best = None if found is None else slowest(costs, found)
        assert best == min(allowed, default=None)


def test_a_new_size_must_pay_for_its_price_unless_every_change_is_wanted() -> None:
    constraints = BatchConstraints(12, (Limits(),) * 2)
    slow = FirstUses(frozenset({4, 6, 8}), (0.9,))
    step = Observation(
        0, (6, 6), (1.0, 1.0), (), (Proportional(18.0), Proportional(6.0)), first_uses=(slow, slow)
    )  # best: (9, 3) in 0.5 s; of used sizes (8, 4) in 0.67 s; now 1 s
    policy = LoadBalanced()
    state, plans = policy.init(constraints), []
    for _ in range(7):
        state = policy.update(state, constraints, step)
        plans.append(state.sizes)
    assert plans == [(8, 4)] * 5 + [(9, 3)] * 2, "six times 1/6 s pay 0.9 s"
    assert state.missed_seconds == 0
    quick = replace(step, first_uses=(FirstUses(slow.sizes, (0.4,)),) * 2)
    bought = policy.update(LoadBalancedState((6, 6), 0.3), constraints, quick)
    assert bought[:2] == ((9, 3), 0.0), "0.5 s pay 0.4 s at once"
    every = LoadBalanced(min_gain=0)
    assert every.update(every.init(constraints), constraints, step).sizes == (9, 3)
    free = replace(step, first_uses=(FirstUses(extra=(0.0,)),) * 2)
    assert policy.update(policy.init(constraints), constraints, free).sizes == (9, 3)


def test_missed_gains_buy_no_plan_that_gains_nothing() -> None:
    constraints = BatchConstraints(1200, (Limits(),) * 2)
    known = FirstUses(frozenset({600, 795, 405}), (300.0,))
    costs = (Proportional(2.0), Proportional(1.0))  # best: (800, 400), by 1.2 %
    step = Observation(0, (600, 600), (300.0, 600.0), (), costs, first_uses=(known, known))
    missed = LoadBalancedState((600, 600), 5000.0)
    assert LoadBalanced().update(missed, constraints, step)[:2] == ((795, 405), 5000.0)


class Learned:
    """Predictor that keeps what it has learned from, and forecasts the speed of the first step."""

    def init(self) -> tuple[float, ...]:
        return ()

    def update(self, state: tuple[float, ...], measurement: Measurement) -> tuple[float, ...]:
        return (*state, measurement.busy_seconds)

    def predict(
        self, state: tuple[float, ...], drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> float:
        return 6 / state[0] if state else 0.0


def test_all_workers_know_which_steps_are_first_uses() -> None:
    balancers = team(2, 12, bounds=BatchBounds(first_uses=True), predictor=Learned())
    for busy, learned in [
        ((0.1, 0.2), [(), ()]),  # first uses of (6, 6)
        ((0.1, 0.2), [(0.1,), (0.2,)]),
        ((9.0, 9.0), [(0.1,), (0.2,)]),  # first uses of (8, 4)
        ((0.15, 0.15), [(0.1, 0.15), (0.2, 0.15)]),
    ]:
        exchange_in_process(balancers, busy)
        for balancer, seen in zip(balancers, learned, strict=True):
            assert balancer.state().estimate.predictor == seen
    assert [each.schedule.latest_plan[0] for each in balancers] == [(8, 4), (8, 4)]
    known = balancers[0].first_uses
    assert known == balancers[1].first_uses
    assert [each.extra for each in known] == [(9 - 0.15,)] * 2, "also outliers"


def test_a_step_that_is_compiled_anew_does_not_end_balance() -> None:
    balancers = team(12, 2400, predictor=LastValue())
    for step in range(42):
        compiles = step == 40
        busy = [x / 1000.0 for x in balancers[0].sizes(step)]
        busy[0] *= 400 if compiles else 0.8
        messages = [
            each.report(seconds, excluded=compiles and each.rank == 0)
            for each, seconds in zip(balancers, busy, strict=True)
        ]
        messages[0] = replace(messages[0], retraced=compiles)
        for each in balancers:
            each.receive(messages, wall_seconds=max(busy))
    assert balancers[0].schedule.latest_plan[0][0] == 245


@dataclass(frozen=True)
class Growing(Even):
    """Batches whose size is new in every step."""

    def update(self, state: Any, constraints: Any, observation: Observation) -> Any:
        more = observation.sizes[0] + 1
        return state._replace(sizes=(more, 100 - more))


def test_records_say_which_times_are_of_first_uses() -> None:
    balancers = team(2, 100, policy=Growing())
    for balancer in balancers:
        balancer.first_uses = FirstUses(extra=(0.5, 0.5)), FirstUses(frozenset(range(100)))
    lines: list[StepLine] = []
    for _ in range(6):
        messages = [each.report(busy) for each, busy in zip(balancers, (0.9, 0.4), strict=True)]
        ended = [each.receive(messages, wall_seconds=0.9) for each in balancers]
        lines.append(ended[0].line())
    assert [line.excluded for line in lines] == [(0,)] * 6, "the fourth is 0.4 s without the rest"
    assert [line.busy_seconds for line in lines] == [(0.9, 0.4)] * 6


def noisy_cluster() -> SyntheticCluster:
    """Four workers at relative speeds 1, 1, 0.6 and 0.3; balanced steps of 0.16 s, noise of 5 %."""
    speeds = np.array([1.0, 1.0, 0.6, 0.3]) * 512 / 0.16 / 2.9
    noise = 0.05 * np.random.default_rng(0).standard_normal((160, 4))
    curves = [Affine(0.0, 1 / speed) for speed in speeds]
    return SyntheticCluster(curves, Slowdowns(1 + noise))


@cache
def simulated(policy: Policy, seconds: float, predictor: Predictor) -> Timeline:
    return run_bsp(noisy_cluster(), SimConfig(512, first_use_seconds=seconds), policy, predictor)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 1.5])
@pytest.mark.parametrize("predictor", [Mixture(), LastValue()], ids=["default", "last value"])
def test_costly_first_uses_do_not_excite_the_plan(predictor: Predictor, seconds: float) -> None:
    free = simulated(LoadBalanced(), 0.0, predictor).wall_seconds[20:].mean()
    run = simulated(LoadBalanced(), seconds, predictor)
    assert run.wall_seconds[20:].mean() <= 1.15 * free
    assert sum(len(set(sizes)) for sizes in run.sizes.T.tolist()) <= 100


@pytest.mark.slow
def test_nor_do_they_without_common_steps() -> None:
    free, short, long = (
        run_async(
            noisy_cluster(), SimConfig(512, first_use_seconds=seconds), SSP(3), LoadBalanced()
        ).total_seconds
        for seconds in (0.0, 0.05, 1.5)
    )
    assert max(short, long) <= 1.2 * free


@dataclass(frozen=True)
class Watched(Growing):
    """It keeps what it has observed, and needs no common steps."""

    is_static: ClassVar[bool] = False
    accepts_narrower_limits: ClassVar[bool] = True
    seen: list[tuple[BatchConstraints, Observation]] = field(default_factory=list)

    def update(self, state: Any, constraints: Any, observation: Observation) -> Any:
        self.seen.append((constraints, observation))
        if constraints.limits[1].maximum == 0:  # it is away
            return state._replace(sizes=(100, 0))
        return super().update(state, constraints, observation)


def test_rounds_tell_first_uses_from_measurements_and_bound_growth() -> None:
    policy = Watched()
    rounds = Rounds(BatchConstraints(100, (Limits(),) * 2), policy, (False, True))
    cost = Proportional(50.0)
    for size, seconds, learned in [
        (50, 1.0, None),  # nothing tells
        (50, 1.0, 1.0),
        (51, 9.0, None),
        (52, 1.05, 1.05),  # as predicted
        (53, 9.0, None),
    ]:
        assert rounds.measured(0, size, seconds) == learned
        rounds.ran(0, size, seconds, cost)
        rounds.ran(1, 50, 1.0, cost)
    for size in (54, 55, 56):
        seconds = rounds.measured(0, size, 9.0)
        rounds.ran(0, size, 9.0, cost)
        rounds.ran(1, 50, 1.0, cost)
    assert seconds is not None, "the fourth in a row"
    assert policy.seen.pop()[1].busy_seconds[0] == seconds < 9
    del policy.seen[-2:]
    excluded = [seen.excluded for _, seen in policy.seen]
    assert excluded == [(0, 1), (), (0,), (), (0,)]
    assert [seen.busy_seconds[0] for _, seen in policy.seen] == [0.0, 1.0, 0.0, 1.05, 0.0]
    assert policy.seen[-1][1].first_uses[0].extra == pytest.approx((7.98, 0.01))
    maxima = [[each.maximum for each in bounds.limits] for bounds, _ in policy.seen]
    assert maxima == [[75, None], [75, None], [76, None], [78, None], [79, None]]


def test_a_worker_that_is_away_has_no_first_uses() -> None:
    policy = Watched()
    rounds = Rounds(BatchConstraints(100, (Limits(),) * 2), policy, (False, True))
    for size, seconds in [(50, 9.0), (50, 1.0), (51, 9.0), (51, 1.0)]:
        rounds.ran(0, 50, 1.0, Proportional(50.0))
        rounds.ran(1, size, seconds, Proportional(50.0))
    known = policy.seen[-1][1].first_uses
    assert extra_seconds(known, (50, 52)) == extra_seconds(known, (50, 0)) == 8.0
    rounds.use_present({0})
    assert extra_seconds(policy.seen[-1][1].first_uses, (50, 0)) == 0.0


def test_proportional_control_is_faster_than_even_batches_nevertheless() -> None:
    even = simulated(Even(), 0.5, LastValue()).total_seconds
    assert simulated(ProportionalControl(), 0.5, LastValue()).total_seconds < 0.8 * even
