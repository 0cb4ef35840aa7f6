"""Policies that follow measured times: EpochBalanced, ProportionalControl, LeaderStraggler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from teams import run, team

from lbbsp_core import (
    BatchConstraints,
    EpochBalanced,
    FixedShares,
    GlobalOrder,
    LastValue,
    LeaderStraggler,
    Limits,
    Observation,
    Policy,
    Proportional,
    ProportionalControl,
)


def slowest(sizes: Sequence[int], speeds: Sequence[float]) -> float:
    return max(x / v for x, v in zip(sizes, speeds, strict=True))


SPEEDS = st.lists(st.integers(10, 100), min_size=2, max_size=5)


def cluster_of(
    global_batch_size: int, *limits: Limits, workers: int = 0, granularity: int = 1
) -> BatchConstraints:
    return BatchConstraints(global_batch_size, limits or (Limits(),) * workers, granularity)


def seen(
    sizes: Sequence[int], busy: Sequence[float], *, excluded: Sequence[int] = (), last: bool = False
) -> Observation:
    nothing = (None,) * len(sizes)
    return Observation(0, tuple(sizes), tuple(busy), tuple(excluded), nothing, last_of_epoch=last)


def closed_loop(
    policy: Policy,
    constraints: BatchConstraints,
    seconds: Callable[[int, int], float],
    steps: int,
    *,
    epoch: int = 1,
) -> list[Any]:
    """States of a run in which worker i takes ``seconds(i, x_i)``."""
    states = [policy.init(constraints)]
    for step in range(steps):
        sizes = states[-1].sizes
        busy = [seconds(rank, x) for rank, x in enumerate(sizes)]
        last = (step + 1) % epoch == 0
        states.append(policy.update(states[-1], constraints, seen(sizes, busy, last=last)))
    return states


def after(policy: Policy, constraints: BatchConstraints, *steps: Observation) -> list[Any]:
    """States of a run, one after each step."""
    states = [policy.init(constraints)]
    for step in steps:
        states.append(policy.update(states[-1], constraints, step))
    return states[1:]


def test_only_what_was_measured_and_is_not_held_counts() -> None:
    observation = seen((5, 5, 5, 5), (1.0, 0.0, 1.0, math.inf), excluded=[2])
    assert [observation.measured(rank) for rank in range(4)] == [True, False, False, False]


# EpochBalanced


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # Shares 1/2 and 1/2, 3 s and 6 s: p / t = 1/6 and 1/12, that is 2/3 and 1/3.
        (
            [seen((30, 30), (1.0, 4.0)), seen((30, 30), (2.0, 2.0), last=True)],
            [((30, 30), (30, 30), (1.0, 4.0)), ((40, 20), (0, 0), (0.0, 0.0))],
        ),
        # Held steps are left out worker by worker.
        (
            [seen((30, 30), (99.0, 3.0), excluded=[0]), seen((30, 30), (1.5, 3.0), last=True)],
            [((30, 30), (0, 30), (0.0, 3.0)), ((40, 20), (0, 0), (0.0, 0.0))],
        ),
        # The first steps of an epoch run with the older plan: speeds are 20 and 10 in both steps.
        (
            [seen((50, 10), (2.5, 1.0)), seen((30, 30), (1.5, 3.0), last=True)],
            [((30, 30), (50, 10), (2.5, 1.0)), ((40, 20), (0, 0), (0.0, 0.0))],
        ),
        # An epoch with an unmeasured worker is counted with the next one.
        (
            [
                seen((30, 30), (1.0, 3.0), excluded=[1], last=True),
                seen((30, 30), (2.0, 3.0), last=True),
            ],
            [((30, 30), (30, 0), (1.0, 0.0)), ((40, 20), (0, 0), (0.0, 0.0))],
        ),
    ],
)
def test_dbs_plans_at_the_end_of_an_epoch_by_p_over_t(
    steps: list[Observation], expected: list[Any]
) -> None:
    assert after(EpochBalanced(), cluster_of(60, workers=2), *steps) == expected


@given(SPEEDS, st.integers(1, 4))
def test_dbs_has_the_best_plan_after_one_epoch(speeds: list[int], epoch: int) -> None:
    constraints = cluster_of(200, workers=len(speeds))
    states = closed_loop(
        EpochBalanced(), constraints, lambda rank, x: x / speeds[rank], 3 * epoch, epoch=epoch
    )
    assert states[epoch - 1].sizes == states[0].sizes
    best = constraints.plan([Proportional(v) for v in speeds])
    for state in states[epoch:]:
        assert slowest(state.sizes, speeds) == slowest(best, speeds)


def test_the_balancer_tells_when_an_epoch_ends() -> None:
    """Epochs of 3 steps, the last one short and therefore held; from step 2 on, after a skip."""
    balancers = team(2, 30, policy="dbs", predictor=LastValue())
    for balancer in balancers:
        balancer.schedule.skip_to(2)
        balancer.schedule.use_order(GlobalOrder(80, 30))
    assert run(balancers, [Proportional(20.0), Proportional(10.0)], 7) == [
        (15, 15),
        (15, 15),
        (10, 10),
        (20, 10),
        (20, 10),
        (14, 6),
        (20, 10),
    ]


def test_without_an_order_there_are_no_epochs() -> None:
    balancers = team(2, 30, policy="dbs", predictor=LastValue())
    assert set(run(balancers, [Proportional(30.0), Proportional(10.0)], 6)) == {(15, 15)}


# ProportionalControl


def control(**options: Any) -> ProportionalControl:
    return ProportionalControl(**{"interval": 1, "smoothing": 1.0, **options})


@given(SPEEDS)
def test_control_reaches_the_fixed_point_in_two_adjustments(speeds: list[int]) -> None:
    constraints = cluster_of(300, workers=len(speeds))
    states = closed_loop(control(dead_band=0.0), constraints, lambda i, x: x / speeds[i], 6)
    best = constraints.plan([Proportional(v) for v in speeds])
    for state in states[2:]:
        assert slowest(state.sizes, speeds) == slowest(best, speeds)


def test_control_approaches_equal_times_where_there_is_an_overhead() -> None:
    """Times of 4 s + x / 2 and 2 s + x are equal, 36 s, at batches (64, 34)."""

    def seconds(rank: int, x: int) -> float:
        return 4 + x / 2 if rank == 0 else 2 + x

    states = closed_loop(control(dead_band=0.0), cluster_of(98, workers=2), seconds, 8)
    assert states[-1].sizes == (64, 34)


def test_control_smooths_from_the_first_time_after_a_change() -> None:
    """Times of 1, 2, 3 s at weight 1/2 give 1, 1.5, 2.25 s; then the mean starts again."""
    first, second, moved, later = after(
        control(smoothing=0.5, interval=3),
        cluster_of(130, workers=2),
        *(seen((65, 65), (seconds, 1.0)) for seconds in (1.0, 2.0, 3.0)),
        seen((40, 90), (7.0, 7.0)),
    )
    assert first.sizes == second.sizes == (65, 65)
    assert second.seconds == (1.5, 1.0)
    assert moved.sizes == (40, 90)  # as 1 / 2.25 to 1
    assert (moved.seconds, moved.steps) == ((0.0, 0.0), 0)
    assert later.seconds == (7.0, 7.0)


@pytest.mark.parametrize(
    ("speeds", "dead_band", "expected"),
    [
        ((21.0, 19.0), 0.05, (20, 20)),  # 1 of 20 is not more than 0.05
        ((22.0, 18.0), 0.05, (22, 18)),
        ((18.0, 22.0), 0.05, (18, 22)),
        # From (100, 100, 100): 3, 3 and 6 of 100. If one is beyond the band, all move.
        ((103.0, 103.0, 94.0), 0.05, (103, 103, 94)),
        ((103.0, 103.0, 94.0), 0.06, (100, 100, 100)),
    ],
)
def test_control_changes_all_beyond_the_dead_band_or_none(
    speeds: tuple[float, ...], dead_band: float, expected: tuple[int, ...]
) -> None:
    constraints = cluster_of(sum(expected), workers=len(speeds))
    policy = control(dead_band=dead_band)
    states = closed_loop(policy, constraints, lambda rank, x: x / speeds[rank], 1)
    assert states[-1].sizes == expected


def test_control_waits_for_its_own_plan_and_for_everybody() -> None:
    foreign, excluded, moved = after(
        control(),
        cluster_of(40, workers=2),
        seen((30, 10), (9.0, 1.0)),
        seen((20, 20), (9.0, 3.0), excluded=[0]),
        seen((20, 20), (1.0, 3.0)),
    )
    assert foreign == control().init(cluster_of(40, workers=2))
    assert (excluded.sizes, excluded.seconds) == ((20, 20), (0.0, 3.0))
    assert moved.sizes == (30, 10)


def crowded(knee: int) -> Callable[[int, int], float]:
    """Speeds 30 and 10, but beyond `knee` samples worker 0 runs at 12."""
    return lambda rank, x: x / (10 if rank else 30 if x <= knee else 12)


def test_control_learns_an_upper_bound_where_growing_costs_throughput() -> None:
    constraints = cluster_of(40, workers=2)
    states = closed_loop(control(), constraints, crowded(25), 6)
    assert [state.sizes for state in states[:3]] == [(20, 20), (30, 10), (20, 20)]
    assert {state.maxima for state in states[2:]} == {(20, None)}
    assert {state.sizes for state in states[2:]} == {(20, 20)}


def test_control_learns_nothing_from_a_lesser_drop() -> None:
    """30 to 12 is a loss of 0.6: less than `drop` = 0.65 sets no bound."""
    states = closed_loop(control(drop=0.65), cluster_of(40, workers=2), crowded(25), 2)
    assert states[-1].maxima == (None, None)
    assert states[-1].sizes == (22, 18)  # as 12 to 10


def test_control_forgets_bounds_that_leave_no_plan() -> None:
    """Both have a bound of 15, together less than 40."""
    constraints, policy = cluster_of(40, workers=2), control()
    state = policy.init(constraints)._replace(maxima=(15, 15))
    state = policy.update(state, constraints, seen((20, 20), (1.0, 3.0)))
    assert (state.sizes, state.maxima) == ((30, 10), (None, None))


def test_control_starts_from_the_open_loop() -> None:
    """Ratings of 9, 12 and 18 cores; the true speeds are as 1 to 1 to 2."""
    constraints, policy = cluster_of(156, workers=3), control(ratings=(9, 12, 18))
    first = policy.init(constraints).sizes
    assert first == FixedShares((9, 12, 18)).init(constraints).sizes == (36, 48, 72)
    states = closed_loop(policy, constraints, lambda i, x: x / (1, 1, 2)[i], 2)
    assert states[-1].sizes == (39, 39, 78)
    assert policy.init(BatchConstraints(156, (Limits(1, 30), Limits(), Limits()))).sizes[0] == 30
    with pytest.raises(ValueError, match=r"ratings must have one value for each of the 2 workers"):
        policy.init(cluster_of(20, workers=2))


# LeaderStraggler


def test_leader_gets_from_straggler_once_the_window_is_full() -> None:
    """Means over the window: 2, 3 and 1 s, though the last step alone would say otherwise."""
    first, second = after(
        LeaderStraggler(delta=4, window=2),
        cluster_of(60, workers=3),
        seen((20, 20, 20), (1.0, 5.0, 1.9)),
        seen((20, 20, 20), (3.0, 1.0, 0.1)),
    )
    assert first.sizes == (20, 20, 20)
    assert second.sizes == (20, 16, 24)
    assert (second.leader, second.straggler, second.counts) == (2, 1, (0, 0, 0))


def test_the_window_is_filled_worker_by_worker() -> None:
    """Three times 1.5 s are more than twice 2 s in all, but not on average."""
    states = after(
        LeaderStraggler(delta=4, window=2),
        cluster_of(40, workers=2),
        seen((20, 20), (1.5, 9.0), excluded=[1]),
        seen((20, 20), (1.5, 2.0)),
        seen((20, 20), (1.5, 2.0)),
    )
    assert [state.sizes for state in states] == [(20, 20), (20, 20), (24, 16)]


def test_a_leader_needs_room_and_a_straggler_has_a_minimum() -> None:
    constraints = BatchConstraints(30, (Limits(1, 11), Limits(9), Limits()))
    states = after(
        LeaderStraggler(delta=4, window=1),
        constraints,
        seen((10, 10, 10), (1.0, 3.0, 2.0)),  # 4 to move, 1 is allowed
        seen((11, 9, 10), (1.0, 3.0, 2.0)),  # the minimum; and the fastest is full
        seen((11, 9, 10), (1.0, 2.0, 3.0)),
    )
    assert [state.sizes for state in states] == [(11, 9, 10), (11, 9, 10), (11, 13, 6)]


@pytest.mark.parametrize(
    ("maximum", "sizes", "busy"),
    [
        (None, (30, 10), (3.0, 1.0)),  # another plan
        (None, (20, 20), (1.0, 1.0)),  # equals
        (20, (20, 20), (1.0, 2.0)),  # all are full
    ],
)
def test_nothing_moves(maximum: int | None, sizes: Any, busy: Any) -> None:
    policy = LeaderStraggler(delta=4, window=1)
    constraints = BatchConstraints(40, (Limits(1, maximum),) * 2)
    assert after(policy, constraints, seen(sizes, busy)) == [policy.init(constraints)]


def test_oscillation_halves_delta_and_enlarges_the_window() -> None:
    constraints, policy = cluster_of(80, workers=2), LeaderStraggler(delta=8, window=1, longest=4)
    state, trail = policy.init(constraints), []
    for fast in (0, 1, 0, 1, 0):
        for _ in range(9):
            sizes = state.sizes
            busy = (1.0, 2.0) if fast == 0 else (2.0, 1.0)
            state = policy.update(state, constraints, seen(sizes, busy))
            if state.sizes != sizes:
                break
        trail.append((state.sizes, state.delta, state.window))
    assert trail == [
        ((48, 32), 8, 1),
        ((44, 36), 4, 2),
        ((46, 34), 2, 4),
        ((45, 35), 1, 4),
        ((46, 34), 1, 4),
    ]


def test_with_many_workers_an_overshoot_is_enough() -> None:
    """The leader of one move is the straggler of the next; its leader is a third one."""
    *_, state = after(
        LeaderStraggler(delta=8, window=1),
        cluster_of(60, workers=3),
        seen((20, 20, 20), (1.0, 2.0, 1.5)),
        seen((28, 12, 20), (3.0, 2.0, 1.0)),
    )
    assert (state.sizes, state.delta, state.window) == ((24, 12, 24), 4, 8 // 4)


@pytest.mark.parametrize(
    ("global_batch_size", "granularity", "delta"), [(640, 1, 20), (16, 1, 1), (64, 8, 8)]
)
def test_delta_begins_with_a_sixteenth_of_an_even_batch_and_is_never_less_than_the_granularity(
    global_batch_size: int, granularity: int, delta: int
) -> None:
    constraints = cluster_of(global_batch_size, workers=2, granularity=granularity)
    even = global_batch_size // 2
    first, *_, last = after(
        LeaderStraggler(window=1),
        constraints,
        seen((even, even), (1.0, 2.0)),
        seen((even + delta, even - delta), (2.0, 1.0)),
    )
    assert (first.sizes, first.delta) == ((even + delta, even - delta), delta)
    assert last.delta == max(delta // 2, granularity), "it has oscillated"


def test_the_third_move_from_one_straggler_doubles_delta_again() -> None:
    constraints, policy = cluster_of(160, workers=2), LeaderStraggler(delta=8, window=1)
    state = policy.init(constraints)._replace(delta=2, window=4)
    deltas = []
    for _ in range(16):
        state = policy.update(state, constraints, seen(state.sizes, (1.0, 2.0)))
        if state.counts == (0, 0):
            deltas.append((state.delta, state.window))
    assert deltas[:5] == [(2, 4), (2, 4), (4, 2), (8, 1), (8, 1)]


@given(SPEEDS)
def test_leader_and_straggler_end_within_a_few_samples_of_the_best(speeds: list[int]) -> None:
    """A fixed point of single samples: no worker is slower than the best plan by two samples."""
    constraints = cluster_of(40 * len(speeds), workers=len(speeds))
    states = closed_loop(LeaderStraggler(window=1), constraints, lambda i, x: x / speeds[i], 500)
    best = slowest(constraints.plan([Proportional(v) for v in speeds]), speeds)
    times = [slowest(state.sizes, speeds) for state in states[-100:]]
    assert min(times) <= best + 2 / min(speeds)
