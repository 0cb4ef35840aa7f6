"""The loop: N balancers in one process, exchanging as a framework's all-reduce does."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from report_runs import line as step_line
from teams import plan, run, team

from lbbsp_core import (
    Affine,
    Balancer,
    BatchConstraints,
    Cost,
    CostShape,
    DisagreementError,
    FixedShares,
    GlobalOrder,
    LastValue,
    Limits,
    LoadBalanced,
    Measurement,
    OutlierFilter,
    Profile,
    Proportional,
    Saturating,
    StepMessage,
)
from lbbsp_core.cost import slowest
from lbbsp_core.order import make_order
from lbbsp_core.runtime.planning.bounds import BatchBounds
from lbbsp_core.testing import check_plan, exchange_in_process

BAD = [math.nan, math.inf, -math.inf, 0.0, -1.0, 5e-324, 1e308]
EXACT = LoadBalanced(min_gain=0.0)
KNOWN = CostShape(Proportional(), max_overhead=0)  # no overhead, whatever the times say


def speeds(*samples_per_second: float) -> list[Cost]:
    return [Proportional(speed) for speed in samples_per_second]


# Agreement


def busy_times(workers: int) -> st.SearchStrategy[list[list[float]]]:
    values = st.one_of(st.floats(1e-3, 10.0), st.floats(), st.sampled_from(BAD))
    step = st.lists(values, min_size=workers, max_size=workers)
    return st.lists(step, min_size=1, max_size=12)


@st.composite
def teams(draw: st.DrawFn) -> list[Balancer]:
    workers, granularity = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    limits = [
        Limits(draw(st.integers(1, 4)), draw(st.sampled_from([None, 60, 64])))
        for _ in range(workers)
    ]
    return team(
        workers,
        granularity * draw(st.integers(20, 25)),
        limits=[Limits(bounds.minimum) if workers == 1 else bounds for bounds in limits],
        granularity=granularity,
        lag=draw(st.integers(1, 3)),
        policy=LoadBalanced(draw(st.sampled_from([0.0, 0.02]))),
        cost=draw(st.sampled_from([Proportional(), Affine(0.01, 0.002)])),
    )


@settings(max_examples=20)
@given(teams(), st.data())
def test_all_agree_on_legal_plans_whatever_is_measured(
    balancers: list[Balancer], data: st.DataObject
) -> None:
    workers = len(balancers)
    for busy in data.draw(busy_times(workers)):
        exchange_in_process(balancers, busy)
        for ahead in range(balancers[0].schedule.lag):
            check_plan(plan(balancers, balancers[0].step + ahead), balancers[0].constraints)


@settings(max_examples=15)
@given(st.floats(), st.floats())
@example(5e-324, 1e308)
@example(1e-12, 1e11)
def test_no_busy_time_breaks_the_loop(first: float, second: float) -> None:
    balancers = team(2, 16)
    for busy in (first, second, 0.5, 0.25, 0.25, 0.25):
        exchange_in_process(balancers, [busy, 0.25])
    assert plan(balancers) in {(8, 8)} | {(x, 16 - x) for x in range(1, 16)}
    (message, _) = exchange_in_process(balancers, [0.25, 0.25])
    assert message.picoseconds_per_sample > 0, "an estimate, whatever came before"


# Convergence


@pytest.mark.parametrize("shape", [Proportional(), Affine(8.0, 1.0)])
@pytest.mark.parametrize("rates", [(10.0, 20.0, 30.0), (200.0, 7.0, 55.0), (1.0, 1.0, 1.0)])
def test_constant_speeds_are_balanced_after_one_step(shape: Cost, rates: tuple[float, ...]) -> None:
    """With the right shape the first measurement tells all, at any batch size."""
    costs = [shape.at_speed(rate) for rate in rates]
    balancers = team(3, 120, policy=EXACT, cost=shape)
    plans = run(balancers, costs, steps=6)
    best = BatchConstraints(120, (Limits(),) * 3).plan(costs)
    assert plans[0] == (40, 40, 40)
    assert plans[1:] == [best] * 5


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("after", [(0.3, 0.7, 0.7), (0.7, 0.3, 0.7)])
def test_swapped_speeds_are_rebalanced_within_six_steps(lag: int, after: tuple[float, ...]) -> None:
    balancers = team(3, 340, lag=lag)
    before = run(balancers, speeds(70, 70, 30), steps=10)[-1]
    assert before == pytest.approx((140, 140, 60), rel=0.03)
    begin = balancers[0].step
    run(balancers, [Proportional(100 * share) for share in after], steps=6)
    best = [340 * share / sum(after) for share in after]
    assert plan(balancers, begin + 6) == pytest.approx(best, rel=0.10)


# Bad measurements


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("steps", [1, 5])
def test_a_bad_busy_time_changes_no_plan(bad: float, steps: int) -> None:
    costs = speeds(10, 20, 30)
    balancers = team(3, 60, policy=EXACT, predictor=LastValue())
    run(balancers, costs, steps=3)
    for _ in range(steps):
        good = [cost(x) for cost, x in zip(costs, plan(balancers), strict=True)]
        messages = exchange_in_process(balancers, [good[0], bad, good[2]])
        assert [message.excluded for message in messages] == [False, True, False]
        assert messages[1].picoseconds_per_sample == 5 * 10**10, "the last good estimate"
        assert plan(balancers) == (10, 20, 30)
    assert run(balancers, costs, steps=2) == [(10, 20, 30)] * 2


@pytest.mark.parametrize("bad", BAD)
def test_peers_still_follow_their_own_speeds(bad: float) -> None:
    balancers = team(3, 60, policy=EXACT, predictor=LastValue())
    run(balancers, speeds(10, 20, 30), steps=2)
    run(balancers, [Proportional(20.0), lambda x: bad, Proportional(20.0)], steps=1)
    assert plan(balancers) == (20, 20, 20)


@pytest.mark.parametrize("bad", BAD)
def test_nobody_moves_before_all_are_known(bad: float) -> None:
    balancers = team(2, 60, predictor=LastValue())
    assert run(balancers, [lambda x: bad, Proportional(9.0)], steps=4) == [(30, 30)] * 4
    run(balancers, speeds(1, 2), steps=1)
    assert plan(balancers) == (20, 40)


def test_held_steps_are_not_learned_from() -> None:
    balancers = team(2, 60, predictor=LastValue())
    run(balancers, speeds(10, 20), steps=2)
    messages = exchange_in_process(balancers, [2.2, 1.1], excluded=[0, 1])
    assert all(message.excluded for message in messages)
    assert [message.busy_nanoseconds for message in messages] == [2_200_000_000, 1_100_000_000]
    assert plan(balancers) == (20, 40)


def test_an_outlier_is_held_until_it_is_the_new_level() -> None:
    gate = OutlierFilter(factor=5.0, patience=3)
    balancers = team(2, 60, outlier_filter=gate, predictor=LastValue(), policy=EXACT)
    run(balancers, speeds(10, 10), steps=2)
    paused = speeds(1, 10)
    assert run(balancers, paused, steps=3) == [(30, 30)] * 3
    assert plan(balancers) != (30, 30)


# Drivers


class Noting(LastValue):
    """Keeps all measurements as its state, and notes what it was asked."""

    asked: ClassVar[list[tuple[tuple[float, ...], int]]] = []

    def init(self) -> tuple[Measurement, ...]:
        return ()

    def update(self, state: Any, measurement: Measurement) -> tuple[Measurement, ...]:
        return (*state, measurement)

    def predict(self, state: Any, drivers: tuple[float, ...] = (), horizon: int = 1) -> float:
        self.asked.append((drivers, horizon))
        return state[-1].samples_per_second if state else math.nan


def test_drivers_are_learned_with_the_step_that_they_were_known_before() -> None:
    (alone,) = team(1, 60, predictor=Noting())
    for step in range(4):
        known = (float(step + 1),)
        exchange_in_process(
            [alone], [1.0 + step], excluded={0} if step == 2 else (), drivers=[known]
        )
    learned = [(m.busy_seconds, m.drivers) for m in alone._estimate.predictor]
    # Before the first step nobody has looked: the first look stands in. Step 2 was held.
    assert learned == [(1.0, (1.0,)), (2.0, (1.0,)), (4.0, (3.0,))]


# Shape


def test_forecasts_are_the_same_whenever_a_predictor_trains() -> None:
    """In a job it trains while messages are exchanged, in the simulator when they are received."""

    def at_once(function):
        done = Future()
        done.set_result(function())
        return done

    beside, later = (Balancer(rank=0, workers=1, global_batch_size=16) for _ in range(2))
    random = np.random.default_rng(3)
    for number in range(40):
        busy, excluded = random.uniform(0.1, 0.3), number % 3 == 2
        messages = [each.report(busy, excluded=excluded) for each in (beside, later)]
        assert messages[0] == messages[1], number
        beside.train(at_once)
        for balancer in (beside, later):
            balancer.receive(messages[:1], busy)


def test_an_overhead_is_learned_and_makes_the_plan_exact() -> None:
    """Times of Affine(40, 1) seconds look like a falling speed as x falls; not to these two."""
    balancers = team(2, 200, policy=EXACT, predictor=LastValue())
    costs = [Affine(0.2, 0.01), Affine(0.2, 0.03)]
    plans = run(balancers, costs, steps=12)
    ideal = BatchConstraints(200, (Limits(),) * 2).plan(costs)
    assert plans[0] == (100, 100)
    assert abs(plans[-1][0] - ideal[0]) <= 1
    assert 0 < balancers[0]._estimate.cost_shape.overhead <= 50  # X / 2N


def test_every_form_of_cost_is_planned_for_exactly() -> None:
    forms: list[Cost] = [
        Proportional(100.0),
        Saturating(0.2, 0.05, 0.004),
        Profile([8, 16, 64], [0.06, 0.07, 0.5]),
        Profile([16, 32], [0.3, 0.3]),
    ]
    shapes = [
        CostShape(form.at_speed(7.0), max_overhead=form.effective_samples(0)) for form in forms
    ]
    balancers = team(4, 240, shapes, policy=EXACT, predictor=LastValue())
    plans = run(balancers, forms, steps=8)
    best = BatchConstraints(240, (Limits(),) * 4).plan(forms)
    for sizes in plans[3:]:
        assert slowest(forms, sizes) <= slowest(forms, best) * 1.001


@given(
    st.lists(st.integers(1, 4000), min_size=2, max_size=12),
    st.lists(st.floats(0.0, 0.02), min_size=12, max_size=12),
)
def test_any_profile_survives_its_introduction(steps: list[int], rises: list[float]) -> None:
    """Slopes and starts are rounded on the way; the curve must not fall by that."""
    batches = np.cumsum(steps).tolist()
    seconds = (0.05 + np.cumsum([rise**3 for rise in rises[: len(steps)]])).tolist()
    balancers = team(2, 4096, cost=Profile(batches, seconds), predictor=LastValue())
    run(balancers, speeds(1000, 900), steps=2)


def test_a_shape_that_no_peer_knows_is_refused() -> None:
    balancer = Balancer(rank=0, workers=2, global_batch_size=8, cost=Saturating(1.0, 0.1, 0.1))
    with pytest.raises(LookupError, match=r"Saturating.*call set_peers\(\) first"):
        balancer.report(0.1)


# Lag


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_plan_decided_after_a_step_serves_lag_steps_later(lag: int) -> None:
    balancers = team(2, 60, lag=lag, policy=EXACT, predictor=LastValue(), cost=KNOWN)
    script = [(10, 20), (20, 10), (30, 40), (12, 24), (36, 12), (20, 20), (40, 20)]
    for step, (first, second) in enumerate(script):
        assert balancers[0].step == step
        run(balancers, speeds(first, second))
        best = BatchConstraints(60, (Limits(),) * 2).plan(speeds(first, second))
        assert plan(balancers, step + lag) == best
    begin = len(script)
    served = [plan(balancers, begin + ahead) for ahead in range(lag)]
    decided = [BatchConstraints(60, (Limits(),) * 2).plan(speeds(*pair)) for pair in script[-lag:]]
    assert served == decided


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_plans_are_known_lag_minus_one_steps_ahead(lag: int) -> None:
    balancers = team(2, 60, lag=lag)
    run(balancers, speeds(1, 2), steps=4)
    for step in (3, 4 + lag):
        with pytest.raises(
            LookupError, match=rf"known for steps 4 to {3 + lag}, not for .* {step}"
        ):
            balancers[0].sizes(step)


def test_predictors_look_as_far_ahead_as_the_plan_serves() -> None:
    Noting.asked.clear()
    balancer = Balancer(rank=0, workers=2, global_batch_size=60, predictor=Noting(), lag=3)
    message = balancer.report(2.0, drivers=(12.0, 40.0))
    assert Noting.asked == [((12.0, 40.0), 3)]
    same_plan = balancer.report(math.nan).checksum
    assert message == StepMessage(round(1e12 / 15), 0, 2 * 10**9, same_plan)


# Disagreeing


@pytest.mark.parametrize("who", [0, 1, 2])
def test_another_plan_on_one_worker_stops_all(who: int) -> None:
    balancers = team(3, 60)
    run(balancers, speeds(1, 2, 3), steps=2)
    messages = [balancer.report(0.1) for balancer in balancers]
    messages[who] = replace(messages[who], checksum=messages[who].checksum ^ 1)
    for balancer in balancers:
        with pytest.raises(
            DisagreementError, match=r"at step 2 worker \d has a different plan .* run"
        ):
            balancer.receive(messages, 0.1)


def test_workers_of_other_options_are_found_out() -> None:
    balancers = [*team(2, 60)[:1], *team(2, 60, policy=FixedShares((1.0, 2.0)))[1:]]
    with pytest.raises(DisagreementError, match=r"worker 1 has a different plan than worker 0"):
        exchange_in_process(balancers, [0.1, 0.1])


# The order, short steps, skipping


def follow(balancers: Iterable[Balancer], num_samples: int, seed: int = 0) -> GlobalOrder:
    first = balancers[0]
    total = first.constraints.global_batch_size
    order = make_order(num_samples, total, workers=first.workers, seed=seed)
    for balancer in balancers:
        balancer.schedule.use_order(order)
    return order


@pytest.mark.parametrize("lag", [1, 3])
def test_each_sample_is_drawn_once_an_epoch_while_plans_change(lag: int) -> None:
    balancers = team(3, 16, lag=lag, policy=EXACT, predictor=LastValue())
    order = follow(balancers, 16 * 4 + 5)
    random = np.random.default_rng(0)
    for epoch in range(3):
        drawn: list[int] = []
        for step in range(epoch * 5, epoch * 5 + 5):
            parts = [balancer.schedule.local_indices(step) for balancer in balancers]
            assert tuple(len(part) for part in parts) == plan(balancers)
            drawn += np.concatenate(parts).tolist()
            run(balancers, speeds(*random.uniform(10, 40, size=3)))
        assert sorted(drawn) == list(range(order.num_samples))


def test_a_short_step_is_not_learned_from() -> None:
    balancers = team(
        2, 16, policy=EXACT, predictor=LastValue(), bounds=BatchBounds(short_step_seconds=0.1)
    )
    follow(balancers, 16 * 2 + 6)
    run(balancers, speeds(10, 30), steps=2)
    before = [balancer.state() for balancer in balancers]
    messages = [balancer.report(0.41) for balancer in balancers]  # no outlier
    assert all(message.excluded for message in messages)
    for balancer, state in zip(balancers, before, strict=True):
        balancer.receive(messages, 0.41)
        assert balancer.state().estimate.predictor == state.estimate.predictor
        assert balancer.state().short_steps[:3] == state.short_steps[:3]
    assert plan(balancers) == (4, 12)


def test_a_short_step_relaxes_minima_and_scales_the_rest() -> None:
    limits = (Limits(8), Limits(8), Limits(8, 50))
    balancers = team(3, 120, limits=limits, granularity=4, policy=EXACT)
    follow(balancers, 133)
    run(balancers, speeds(10, 20, 30))
    assert plan(balancers) == (3, 5, 5), "of (24, 48, 48)"
    run(balancers, speeds(10, 20, 30))
    assert plan(balancers) == (24, 48, 48)


@pytest.mark.parametrize(
    ("granularity", "parts", "rest", "expected"),
    [
        (4, 1, 16, (4, 4, 8)),  # multiples of the granularity, where they can be
        (4, 1, 4, (1, 1, 2)),  # too few for a multiple in each batch
        (4, 1, 14, (2, 4, 8)),
        (4, 2, 22, (4, 6, 12)),  # two parts for two devices
        (4, 1, 13, (2, 4, 7)),
        (1, 3, 9, (3, 3, 3)),  # samples for each part
        (2, 2, 12, (2, 4, 6)),
    ],
)
def test_a_short_step_keeps_granularity_and_parts(
    granularity: int, parts: int, rest: int, expected: tuple[int, ...]
) -> None:
    balancers = team(3, 120, granularity=granularity, bounds=BatchBounds(parts), policy=EXACT)
    follow(balancers, 120 + rest)
    run(balancers, speeds(10, 20, 30))
    assert plan(balancers) == expected


@settings(max_examples=25)
@given(st.integers(2, 5), st.integers(0, 40), st.lists(st.floats(0.1, 10), min_size=5, max_size=5))
def test_short_steps_are_legal(workers: int, rest: int, busy: list[float]) -> None:
    total = 41
    balancers = team(workers, total, limits=Limits(3, 38), policy=EXACT)
    order = follow(balancers, total + rest)
    exchange_in_process(balancers, busy[:workers])
    if order.steps_per_epoch == 2:
        assert sum(plan(balancers)) == rest
        assert all(1 <= size <= 38 for size in plan(balancers))
    else:
        assert rest < workers
    exchange_in_process(balancers, busy[:workers])
    assert sum(plan(balancers, 2)) == total


@pytest.mark.parametrize(
    ("samples", "total", "options", "steps", "notice"),
    [
        (16, 8, {"workers": 2}, 2, ""),
        (12, 8, {"workers": 2}, 2, "12 samples has one full step of 8"),
        (22, 8, {"workers": 2}, 3, ""),
        (22, 8, {"workers": 2, "drop_last": True}, 2, ""),
        (43, 20, {"workers": 4}, 2, "3 of 43 samples are dropped in each epoch"),
        (44, 20, {"workers": 4}, 3, ""),
        (30, 12, {"workers": 3, "parts": 2}, 3, ""),
        (29, 12, {"workers": 3, "parts": 2}, 2, "than the 3 workers times 2 parts of a batch"),
    ],
)
def test_a_last_step_is_short_or_dropped(
    samples: int,
    total: int,
    options: dict[str, Any],
    steps: int,
    notice: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert make_order(samples, total, **options).steps_per_epoch == steps
    assert len(caplog.records) == bool(notice)
    assert notice in caplog.text


def test_drawing_needs_an_order() -> None:
    with pytest.raises(LookupError, match=r"call use_order\(\) first"):
        team(2, 8)[0].schedule.local_indices(0)
    with pytest.raises(ValueError, match="num_samples = 7 < global_batch_size = 8"):
        make_order(7, 8, workers=2)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_skipping_keeps_the_latest_plan(lag: int) -> None:
    balancers = team(2, 60, lag=lag, policy=EXACT)
    run(balancers, speeds(1, 2), steps=2)
    for balancer in balancers:
        balancer.schedule.skip_to(40)
    for ahead in range(lag):
        assert plan(balancers, 40 + ahead) == (20, 40)
    with pytest.raises(LookupError):
        balancers[0].sizes(2)
    run(balancers, speeds(2, 1), steps=1)
    assert balancers[0].step == 41
    for balancer in balancers:
        balancer.schedule.skip_to(3)
    assert {balancer.step for balancer in balancers} == {41}, "never back"


def test_an_epoch_begins_where_the_last_one_ended_or_ahead() -> None:
    balancer = team(2, 10)[0]
    balancer.schedule.begin_epoch(3)
    assert balancer.step == 0, "no order, no epochs"
    balancer.schedule.use_order(GlobalOrder(40, 10))
    balancer.schedule.begin_epoch(0)
    assert balancer.step == 0
    balancer.schedule.skip_to(5)
    balancer.schedule.begin_epoch(1)
    assert balancer.step == 8, "the rest of an epoch that was stopped is skipped"
    balancer.schedule.begin_epoch(1)
    assert balancer.step == 8
    balancer.schedule.begin_epoch(5)
    assert balancer.step == 20


def test_an_order_begins_at_the_running_step() -> None:
    balancers = team(2, 10)
    follow(balancers, 40)
    run(balancers, speeds(1, 1), steps=4)
    order = follow(balancers, 30, seed=1)
    drawn = np.concatenate([balancer.schedule.local_indices(4) for balancer in balancers])
    assert drawn.tolist() == order.indices(0).tolist()
    balancers[0].schedule.begin_epoch(1)
    assert balancers[0].step == 7


def test_one_worker_alone_draws_any_step() -> None:
    (balancer,) = team(1, 10)
    order = follow([balancer], 25)
    assert [len(balancer.schedule.local_indices(step)) for step in (0, 2, 5)] == [10, 5, 5]
    assert balancer.schedule.local_indices(4).tolist() == order.indices(4).tolist()


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total": 2}, r"workers \* minimum = 3, got 2: raise it, or lower Limits\.minimum"),
        ({"limits": Limits(30)}, r"workers \* minimum = 90, got 60"),
        ({"limits": Limits(1, 19)}, r"sum of maxima = 57, got 60: lower the global batch size"),
        ({"limits": [Limits()] * 2}, r"one for each of the 3 workers, got 2"),
        ({"granularity": 32}, r"granularity = 32.*lower granularity, widen the Limits"),
        ({"total": 12, "bounds": BatchBounds(parts=5)}, r"workers \* minimum = 15, got 12"),
        ({"granularity": 0}, r"granularity must be .* >= 1, got 0"),
        ({"lag": 0}, r"lag must be >= 1, got 0"),
        ({"policy": FixedShares((1.0, 2.0))}, r"one value for each of the 3 workers, got 2"),
    ],
)
def test_options_without_a_plan_name_value_and_cure(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        team(**{"workers": 3, "total": 60, **options})


@pytest.mark.parametrize(("rank", "workers"), [(3, 3), (-1, 3), (0, 0)])
def test_a_rank_that_is_no_worker(rank: int, workers: int) -> None:
    with pytest.raises(ValueError, match=rf"rank must be in \[0, {workers}\), got {rank}"):
        Balancer(rank=rank, workers=workers, global_batch_size=60)


# The record


def test_the_lines_of_a_record() -> None:
    balancers = team(2, 12, policy=EXACT)
    follow(balancers, 27)
    lines, receive = [], balancers[0].receive
    balancers[0].receive = lambda *step: lines.append(receive(*step).line())  # type: ignore[assignment]
    run(balancers, speeds(10, 20))
    exchange_in_process(balancers, [0.4, math.nan], wall_seconds=0.5)
    run(balancers, speeds(10, 20))
    first, second, third = lines
    assert first == step_line(0, (6, 6), (0.6, 0.3), 0.6, time=first.time)
    assert (second.sizes, second.excluded, second.wall_seconds) == ((4, 8), (1,), 0.5)
    assert second.busy_seconds == (0.4, 0.0)
    assert second.predicted_seconds == pytest.approx((0.4, 0.4))
    assert (third.sizes, third.short) == ((1, 2), True)
    assert third.predicted_seconds == (None, None)
