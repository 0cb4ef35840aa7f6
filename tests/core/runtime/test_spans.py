"""Spans: several short steps are one measurement, and the plan stays in between."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import Future
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from teams import plan, play, team

from lbbsp_core import Balancer, CostShape, LastValue, LoadBalanced, Mixture, Proportional
from lbbsp_core.predict.estimator import EstimatorState, SpeedEstimator
from lbbsp_core.runtime.checkpoint.checkpoint import to_bytes
from lbbsp_core.runtime.options.defaults import SHORT_STEP_SECONDS
from lbbsp_core.runtime.planning.bounds import BatchBounds
from lbbsp_core.runtime.planning.short_steps import ShortSteps, ShortStepsState

BOUNDS = BatchBounds(short_step_seconds=SHORT_STEP_SECONDS)
SLOWNESS = 4e-5, 1e-4  # seconds a sample; 12.8 ms in an even batch of the slower worker


def short_team(**options: Any) -> list[Balancer]:
    return team(2, 256, bounds=BOUNDS, **{"policy": LoadBalanced(0.0), **options})


def ends(busy: Iterable[float], threshold: float = SHORT_STEP_SECONDS) -> list[int]:
    """Returns the steps with which spans end, if the slower worker is busy for so long in each."""
    short, found = ShortSteps(threshold), []
    for step, seconds in enumerate(busy):
        if short.ends_span:
            found.append(step)
        short.observe((seconds, seconds / 2), (0, 1) if step % 8 == 7 else ())
    return found


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(0.1, 1), (0.025, 1), (0.0249, 2), (0.0125, 2), (0.0124, 3), (0.0051, 5), (0.001, 25)],
)
def test_spans_have_the_fewest_steps_that_are_not_short(seconds: float, steps: int) -> None:
    found = ends([seconds] * 200)
    assert found[0] == 0, "nothing is known yet"
    assert {after - before for before, after in pairwise(found)} == {steps}
    assert ends([seconds] * 200, 0.0) == [*range(200)]


def test_spans_follow_the_time_of_steps_at_once() -> None:
    assert ends([0.001] * 40 + [0.3] * 9 + [0.01] * 9) == [0, 25, *range(41, 50), 52, 55]


def test_the_state_of_a_version_without_spans_bounds_batches_at_once() -> None:
    short = ShortSteps(SHORT_STEP_SECONDS)
    short.state = ShortStepsState((0.004, 0.005), 30)
    assert short.fraction == pytest.approx(0.2)


def learned(*steps: tuple[float, float | None, bool], span: int) -> tuple[EstimatorState, list]:
    """Returns the state after steps (samples, seconds, excluded), and which were accepted."""
    estimator = SpeedEstimator(Mixture(), CostShape(Proportional(), max_overhead=50))
    state, accepted = estimator.init(), []
    for number, (samples, seconds, excluded) in enumerate(steps, 1):
        state, is_accepted = estimator.learn(
            state, samples, seconds, excluded=excluded, ends_span=number % span == 0
        )
        accepted.append(is_accepted)
        assert estimator.trains(state) or number % span
        if estimator.trains(state):
            state = estimator.train(state)
    return state, accepted


def test_a_span_is_learned_as_its_mean() -> None:
    spans, _ = learned(
        (10, 0.25, False), (30, 0.5, False), (8, 0.25, False), (8, 0.5, False), span=2
    )
    means, _ = learned((20, 0.375, False), (8, 0.375, False), span=1)
    assert to_bytes(spans[1:]) == to_bytes(means[1:])


def test_what_is_excluded_is_not_in_the_mean() -> None:
    steps = [(10, 0.1, False), (10, 9.0, True), (10, 60.0, False), (10, None, False)]
    spans, accepted = learned(*steps, *[(10, 0.2, True)] * 4, (10, 0.3, False), *steps[1:], span=4)
    means, _ = learned((10, 0.1, False), (10, 0.3, False), span=1)
    assert accepted == [True, *[False] * 7, True, *[False] * 3]
    assert to_bytes(spans.predictor) == to_bytes(means.predictor)


def test_a_step_that_is_excluded_does_not_part_spans() -> None:
    """So that the overhead is learned where each epoch, with its first step, is one span."""
    shape = CostShape(Proportional(), max_overhead=50)
    estimator = SpeedEstimator(LastValue(), shape)
    state = estimator.init()
    for step in range(400):
        samples = 60 if step // 4 % 2 else 100
        seconds = (samples + 20) / 1000
        is_first, is_last = step % 4 == 0, step % 4 == 3
        state, _ = estimator.learn(state, samples, seconds, excluded=is_first, ends_span=is_last)
    assert state.cost_shape.overhead == pytest.approx(20, rel=0.1)


def test_forecasts_and_drivers_are_those_of_the_last_end() -> None:
    balancers, messages = short_team(predictor=Mixture()), []
    seen: list[tuple[float, ...]] = []
    last: list[int] = []  # steps with which spans end

    def learn(*args: Any, **options: Any) -> Any:
        seen.append(args[3])
        return SpeedEstimator.learn(balancers[0].estimator, *args, **options)

    with patch.object(balancers[0], "estimator", wraps=balancers[0].estimator) as watched:
        watched.learn.side_effect = learn
        for step in range(64):
            busy = [8e-5 * x * (1 + step % 3 / 20) for x in plan(balancers)]
            if step == 50:  # a restart within a span
                balancers[0].restore(balancers[0].state())
            last += [step] if balancers[0].bounds.short_steps.ends_span else []
            messages.append([
                one.report(seconds, drivers=(float(step),))
                for one, seconds in zip(balancers, busy, strict=True)
            ])  # fmt: skip
            for one in balancers:
                one.receive(messages[-1], max(busy))
    assert last == [0, *range(3, 64, 3)]
    assert seen[1:] == [(float((step - 1) // 3 * 3),) for step in range(1, 64)]
    sent = [message[1].picoseconds_per_sample for message in messages]
    assert [step for step in range(1, 64) if sent[step] != sent[step - 1]] == last[1:]
    assert watched.predict.call_count == len(last)
    assert balancers[0].state().drivers == (63.0,)


def test_plans_and_forecasts_change_where_spans_end() -> None:
    balancers = short_team(predictor=LastValue())
    plans, forecasts, within = [], [], []
    for step in range(64):
        plans.append(plan(balancers))
        within += [] if balancers[1].bounds.short_steps.ends_span else [step]
        busy = [slow * x for slow, x in zip(SLOWNESS, plans[-1], strict=True)]
        messages = [one.report(seconds) for one, seconds in zip(balancers, busy, strict=True)]
        forecasts.append([message.picoseconds_per_sample for message in messages])
        for one in balancers:
            one.receive(messages, max(busy))
    assert len(set(plans)) > 3
    assert len(within) > 35
    for step in within[:-1]:
        assert (plans[step + 1], forecasts[step]) == (plans[step], forecasts[step - 1])
    assert plans[-1] == pytest.approx((169, 87), abs=2), "bounded by the time of a step"


def test_noise_within_a_span_hardly_moves_plans() -> None:
    def spread(threshold: float) -> int:
        bounds = BatchBounds(short_step_seconds=threshold)
        balancers = team(2, 256, bounds=bounds, predictor=LastValue(), policy=LoadBalanced(0.0))
        turns = itertools.cycle((0.8, 1.2))
        costs = [lambda x: 2e-5 * x * next(turns), lambda x: 2e-5 * x]
        first = [sizes[0] for sizes in play(balancers, costs, 200)][-50:]
        return max(first) - min(first)

    assert spread(1e-9) >= 20
    assert spread(SHORT_STEP_SECONDS) <= 4


def test_nothing_is_trained_within_a_span() -> None:
    balancers, trainings = short_team(predictor=Mixture()), []

    def start(train: Any) -> Future:
        trainings.append(balancers[0].step)
        done: Future = Future()
        done.set_result(train())
        return done

    for _ in range(64):
        sizes = plan(balancers)
        messages = [one.report(4e-5 * x) for one, x in zip(balancers, sizes, strict=True)]
        for one in balancers:
            one.train(start) if one.rank == 0 else None
            one.receive(messages, 0.005)
    assert trainings == [*range(0, 64, 5)]
