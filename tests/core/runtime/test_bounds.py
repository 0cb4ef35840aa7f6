"""The chain of bounds: what each of them makes of constraints, and that the loop applies them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from teams import meet, plan, play, team

from lbbsp_core import (
    Affine,
    Balancer,
    BatchConstraints,
    EpochBalanced,
    Even,
    FixedShares,
    GlobalOrder,
    LastValue,
    LeaderStraggler,
    Limits,
    LoadBalanced,
    Observation,
    Policy,
    Profile,
    Proportional,
    ProportionalControl,
)
from lbbsp_core.order import make_order
from lbbsp_core.policy import FirstUses, bound_growth
from lbbsp_core.runtime.exchange.protocol import LINE, PeerInfo
from lbbsp_core.runtime.options.defaults import SHORT_STEP_SECONDS
from lbbsp_core.runtime.planning import bounds
from lbbsp_core.runtime.planning.bounds import BatchBounds, Situation, with_cap
from lbbsp_core.runtime.planning.short_steps import ShortSteps
from lbbsp_core.testing import exchange_in_process

FREE = Limits()
X = 96


def limits_of(constraints: BatchConstraints) -> list[tuple[int, int | None]]:
    return [(each.minimum, each.maximum) for each in constraints.limits]


def maxima_of(constraints: BatchConstraints) -> list[int | None]:
    return [each.maximum for each in constraints.limits]


# Bounds that are fixed


def fixed(
    constraints: BatchConstraints,
    *,
    policy: Policy = LoadBalanced(),  # noqa: B008
    memory: tuple[int | None, ...] = (),
    granularity: int = 1,
    parts: int = 1,
    are_limits_given: bool = False,
) -> BatchConstraints:
    """The constraints after all bounds; `memory` has the largest batches that workers know."""
    known = memory or (None,) * constraints.workers
    peers = tuple(PeerInfo(LINE, most, granularity) for most in known)
    given = BatchBounds(parts=parts, default_maximum=True)
    now = Situation(policy, peers, are_limits_given, given)
    return bounds.last(bounds.narrow(constraints, now, bounds.FIXED))


def known(*memory: int | None) -> dict[str, Any]:
    return {"workers": len(memory), "memory": memory}


GIVEN = {"limits": (FREE, Limits(1, 12), Limits(1, 30)), "are_limits_given": True}


@pytest.mark.parametrize(
    ("options", "maxima"),
    [
        ({"workers": 1}, [None]),
        ({"workers": 4}, [48] * 4),
        ({"workers": 4, "are_limits_given": True}, [None] * 4),
        ({"workers": 4, "policy": FixedShares((9, 1, 1, 1))}, [None] * 4),
        ({"workers": 4, "policy": Even()}, [None] * 4),
        # What the memory of others leaves; within the usual maximum; a known memory may exceed it.
        (known(4, None, 4, 4, None, 4, 4, 4), [4, 36, 4, 4, 36, 4, 4, 4]),
        (known(4, None, 4, None), [4, 48, 4, 48]),
        (known(None, 80, None, None), [48, 80, 48, 48]),
        # Of a given maximum and a known memory the smaller one counts.
        ({**GIVEN, "memory": (20, 20, 20)}, [20, 12, 20]),
        ({**GIVEN, "memory": (20, None, 20), "parts": 2}, [40, 12, 30]),
    ],
)
def test_memory_and_the_default_maximum_bound_batches(
    options: dict[str, Any], maxima: list[int | None]
) -> None:
    limits = options.get("limits") or (FREE,) * options["workers"]
    others = {name: options[name] for name in options if name not in ("limits", "workers")}
    bounded = fixed(BatchConstraints(X, limits), **others)
    assert maxima_of(bounded) == maxima
    assert {each.minimum for each in bounded.limits} == {options.get("parts", 1)}


@pytest.mark.parametrize(
    ("total", "most", "before", "after"),
    [(256, None, 1, 8), (256, None, 16, 16), (200, 100, 1, 1)],
    ids=["larger", "smaller", "no plan"],
)
def test_batches_are_multiples_of_the_largest_granularity_with_which_there_is_a_plan(
    total: int, most: int | None, before: int, after: int
) -> None:
    constraints = BatchConstraints(total, (Limits(1, most),) * 2, before)
    assert fixed(constraints, granularity=8).granularity == after


@given(total=st.integers(9, 1000), workers=st.integers(2, 9), granularity=st.integers(1, 9))
def test_the_cap_is_twice_the_even_share_and_leaves_a_plan(
    total: int, workers: int, granularity: int
) -> None:
    total += -total % granularity
    assume(total >= workers * granularity)
    (cap,) = set(maxima_of(fixed(BatchConstraints(total, (FREE,) * workers, granularity))))
    if cap is None:
        twice = 2 * -(-total // workers)
        assert -(-twice // granularity) * granularity >= total - (workers - 1)
    else:
        assert cap % granularity == 0
        assert 0 <= cap - 2 * total / workers < 2 + granularity
        assert cap * workers >= total


some_limits = st.builds(
    lambda minimum, extra: Limits(minimum, None if extra is None else minimum + extra),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(0, 8)),
)


def has_plan(constraints: BatchConstraints) -> bool:
    """Tries all plans, worker after worker: their sums so far, and remainders so far."""
    total = constraints.global_batch_size
    found = {(0, 0)}
    for limits in constraints.limits:
        sizes = range(limits.minimum, min(limits.maximum or total, total) + 1)
        found = {
            (done + size, odd + (size % constraints.granularity > 0))
            for (done, odd), size in product(found, sizes)
            if done + size <= total
        }
    return not {(total, 0), (total, 1)}.isdisjoint(found)


@given(
    st.lists(some_limits, min_size=2, max_size=4),
    st.integers(1, 24),
    st.integers(1, 6),
    st.integers(1, 24),
)
def test_the_cap_is_raised_just_as_far_as_a_plan_needs(
    limits: list[Limits], total: int, granularity: int, cap: int
) -> None:
    total = max(total, sum(each.minimum for each in limits))
    known = BatchConstraints(total, tuple(limits), granularity)

    def within(cap: int) -> BatchConstraints:
        each = (
            replace(one, maximum=max(cap, one.minimum)) if one.maximum is None else one
            for one in limits
        )
        return replace(known, limits=tuple(each))

    bounded = with_cap(known, cap)
    if all(one.maximum is not None for one in limits) or not has_plan(known):
        assert bounded == known
    else:
        used = next(n for n in range(cap, total + cap + 1) if within(n) == bounded)
        assert has_plan(bounded)
        assert used == cap or (used > cap and not has_plan(within(used - 1)))
        bounded.plan([Proportional(1.0)] * len(limits))


# Growth


def test_the_plan_in_force_stays_allowed_and_other_maxima_stay() -> None:
    """As after a restart, with the plan of a checkpoint."""
    constraints = BatchConstraints(128, (FREE, Limits(1, 40)), granularity=64)
    bounded = bound_growth(constraints, [FirstUses()] * 2, (96, 32), (False, False), (90.0, None))
    assert maxima_of(bounded) == [96, 40]
    ran = [FirstUses(largest=96, settled_seconds=1.0), FirstUses(largest=32)]
    for percent, largest in [(120.0, 96), (80.0, 114), (None, 160)]:
        bounded = bound_growth(constraints, ran, (90, 38), (False, False), (percent, None))
        assert maxima_of(bounded) == [largest, 40]


def test_memory_counts_once_it_has_been_read_after_the_largest_batch() -> None:
    worker, other, maxima = FirstUses().ran(64, 0.15), FirstUses(largest=64), []
    constraints = BatchConstraints(128, (FREE, FREE))
    for planned in (64, 60, 70, 70, 70):
        arguments = (worker, other), (64, 64), (False, True), (50.0, None)
        maxima.append(bound_growth(constraints, *arguments).limits[0].maximum)
        worker = worker.ran(planned, 0.15)
    assert maxima == [64, 64, 96, 70, 70]


def test_a_learned_bound_of_proportional_control_allows_no_growth() -> None:
    policy = ProportionalControl(interval=1)
    constraints = BatchConstraints(256, (Limits(1, 96), FREE))
    state = policy.init(BatchConstraints(256, (FREE,) * 2))
    state = state._replace(sizes=(64, 192), maxima=(200, None))
    seen = Observation(0, (64, 192), (0.1, 1.0), (), (None, None))
    assert policy.update(state, constraints, seen).sizes == (96, 160)


# Short steps


def test_contention_makes_short_steps_no_longer() -> None:
    short, random_times = ShortSteps(SHORT_STEP_SECONDS), random.Random(0)
    for _ in range(1000):
        short.observe([0.01 if random_times.random() < 0.6 else 0.03 for _ in range(2)], ())
    assert short.seconds is not None
    assert short.seconds < 0.0145, "the mean is 18 ms, the expectile 0.2 12.9 ms"


@pytest.mark.parametrize(
    ("seconds", "fraction", "limits"),
    [  # of even shares of 24 samples, by default until steps take 25 ms
        (0.005, 0.2, [(20, 28), (20, 28)]),
        (0.0125, 0.5, [(20, 36), (12, 30)]),  # bounds of the user hold
        (0.02, 0.8, [(20, 43), (5, 30)]),
        (0.03, 1.0, [(20, None), (1, 30)]),
    ],
)
def test_short_steps_stay_near_even_shares_within_given_limits(
    seconds: float, fraction: float, limits: list[tuple[int, int | None]]
) -> None:
    short = ShortSteps(SHORT_STEP_SECONDS)
    short.observe((seconds, seconds), ())
    assert short.fraction == pytest.approx(fraction)
    assert limits_of(short.narrow(BatchConstraints(48, (Limits(20), Limits(1, 30))))) == limits


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=40), st.floats(1e-3, 0.04))
def test_one_disturbance_widens_the_bounds_by_a_tenth_at_most(
    times: list[float], usual: float
) -> None:
    short = ShortSteps(SHORT_STEP_SECONDS)
    short.observe((1.0, usual), ())  # a pause in the first step counts as little
    assert max(short.state.seconds) <= 1.1 * usual * (1 + 1e-12)
    for seconds in times:
        before = short.state.seconds
        assert before is not None
        short.observe((usual / 2, seconds), ())
        assert 0.9 * max(before) <= max(short.state.seconds) <= 1.1 * max(before) * (1 + 1e-12)
    before = short.state.seconds
    short.observe((9.0, 0.0), (0,))
    assert short.state.seconds == before, "excluded and invalid times are not counted"


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=5),
    st.sampled_from([1, 4, 8]),
    st.floats(1e-4, 0.1),
    st.data(),
)
def test_plans_within_the_bounds_of_short_steps_always_exist(
    ranges: list[tuple[int, int]], granularity: int, seconds: float, data: st.DataObject
) -> None:
    limits = tuple(Limits(low, low + more if more else None) for low, more in ranges)
    highest = sum(each.maximum or 100 for each in limits)
    total = data.draw(st.integers(sum(each.minimum for each in limits), highest))
    constraints = BatchConstraints(total, limits, granularity)
    try:
        even = Even().init(constraints).sizes
    except ValueError:
        return  # no plan exists at all
    short = ShortSteps(SHORT_STEP_SECONDS)
    short.observe((seconds,) * len(limits), ())
    narrow = short.narrow(constraints)
    assert narrow.allow(even)
    sizes = narrow.plan([Affine(0.001, data.draw(st.floats(1e-6, 1.0))) for _ in limits])
    assert constraints.allow(sizes)
    changes = zip(sizes, even, strict=True)
    is_near = all(abs(size - share) <= share * short.fraction for size, share in changes)
    assert is_near or short.fraction == 1 or total % granularity


# The loop


def bounded_team() -> list[Balancer]:
    """Balancers of three workers with all bounds, after steps; the first is ten times as fast."""
    given = BatchBounds(
        parts=2, granularity=8, default_maximum=True, short_step_seconds=0.1, first_uses=True
    )
    costs = [None, None, Profile([8, 16], [0.1, 0.2], out_of_memory_at=21)]
    options = {"policy": LoadBalanced(min_gain=0.0), "predictor": LastValue(), "bounds": given}
    made = team(3, 104, costs, **options)
    for _ in play(made, [Proportional(speed) for speed in (1000, 100, 100)], 6):
        pass
    return made


def test_the_trace_says_what_each_bound_does() -> None:
    trace = bounded_team()[0].bounds.trace
    assert list(trace) == [each.__name__ for each in bounds.FIXED]
    assert [each.minimum for each in trace["parts"].limits] == [2, 2, 2]
    assert maxima_of(trace["memory"]) == [None, None, 40]
    assert [each.granularity for each in trace.values()] == [1, 1, 8, 8]
    assert maxima_of(trace["default_maximum"]) == [72, 72, 40], "twice 35"


@pytest.mark.parametrize("bound", [*bounds.FIXED, *bounds.MOVING], ids=lambda each: each.__name__)
def test_the_loop_runs_without_each_of_them(
    bound: bounds.Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bounded_team()[0].schedule.latest_plan[0]
    for name in ("FIXED", "MOVING"):
        chain = tuple(each for each in getattr(bounds, name) if each is not bound)
        monkeypatch.setattr(bounds, name, chain)
    made = bounded_team()
    assert sum(made[0].schedule.latest_plan[0]) == sum(whole) == 104
    assert {each.schedule.latest_plan[0] for each in made} == {made[0].schedule.latest_plan[0]}


def with_memory(*memory: int) -> list[Balancer]:
    """Balancers of workers that know these largest batches, if they do, after the handshake."""
    costs = [
        Profile([1, 2], [0.001, 0.002], out_of_memory_at=most + 1) if most else None
        for most in memory
    ]
    made = team(len(memory), X, costs, bounds=BatchBounds(default_maximum=True))
    meet(made)
    return made


def test_the_memory_of_a_profile_bounds_the_plans_of_all_workers() -> None:
    made = with_memory(4, 0, 4, 4, 0, 4, 4, 4)
    for _ in range(2):
        assert plan(made) == (4, 36, 4, 4, 36, 4, 4, 4)
        assert {each.bounds.default_maximum for each in made} == {36}
        meet(made)  # every fit begins with a handshake
    with pytest.raises(ValueError, match="must be at most the sum of maxima = 20"):
        with_memory(4, 4, 4, 4, 4)


def test_many_small_samples_may_have_the_work_of_the_cap() -> None:
    balancers = team(3, 12, bounds=BatchBounds(default_maximum=True))
    work = np.ones(12)
    work[10:] = 20.0  # nearly all of the work of a step is in two samples
    for balancer in balancers:
        order = make_order(12, 12, workers=3, shuffle=False, steps_per_epoch=1, work=work)
        balancer.schedule.use_order(order)
    assert plan(balancers) == (10, 1, 1)


def test_batches_that_are_drawn_keep_their_granularity() -> None:
    drawing = team(2, 256, lag=3, bounds=BatchBounds(granularity=8, default_maximum=True))
    for each in drawing:
        each.schedule.use_order(GlobalOrder(256 + 100, 256))
    drawn = [plan(drawing, step) for step in range(3)]
    assert drawn[1] == (50, 50)
    meet(drawing, are_drawn=True)
    assert [plan(drawing, step) for step in range(3)] == drawn
    assert drawing[0].constraints.granularity == 8
    for each in drawing:
        each.schedule.skip_to(3)
    assert plan(drawing) == (52, 48), "a short step"


@settings(max_examples=25)
@given(
    st.sampled_from(
        [
            LoadBalanced(),
            LoadBalanced(min_gain=0.0),
            ProportionalControl(interval=1),
            LeaderStraggler(delta=1000, window=1),
            EpochBalanced(),
        ]
    ),
    st.integers(1, 3),
    st.sampled_from([1, 8, 48]),
    st.sampled_from([None, Limits(1, 128)]),
    st.lists(st.tuples(*[st.floats(0.05, 20.0)] * 2), min_size=12, max_size=12),
)
def test_no_batch_is_larger_than_one_and_a_half_times_what_was_run(
    policy: Policy,
    lag: int,
    granularity: int,
    limits: Limits | None,
    speeds: list[tuple[float, ...]],
) -> None:
    balancers = team(
        2, 128, policy=policy, limits=limits, granularity=granularity, lag=lag,
        predictor=LastValue(), bounds=BatchBounds(first_uses=True),
    )  # fmt: skip
    for balancer in balancers:
        balancer.schedule.use_order(GlobalOrder(128 * 4, 128))  # epochs of four steps
    ran = plan(balancers)
    for now in speeds:
        (sizes,) = play(balancers, list(map(Proportional, now)))
        assert BatchConstraints(128, (FREE,) * 2, granularity).allow(sizes)
        if limits is None:
            pairs = zip(sizes, ran, strict=True)
            assert all(x <= max(1.5 * most, most + granularity) for x, most in pairs)
        ran = tuple(map(max, ran, sizes))


def test_batches_by_work_grow_with_the_work_of_the_plan() -> None:
    """The worker with few, long samples may have more work."""
    balancers = team(2, 8, predictor=LastValue(), bounds=BatchBounds(first_uses=True))
    work = np.tile([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 6.0, 12.0], 20)
    for balancer in balancers:
        balancer.schedule.use_order(make_order(160, 8, workers=2, shuffle=False, work=work))
    for _ in range(12):
        exchange_in_process(balancers, [0.6, 0.2])
    assert balancers[0].schedule.latest_plan[0] == (1, 7)
