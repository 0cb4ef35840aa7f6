"""The loop under disturbed measurements: no batch runs away, and equal workers stay near even."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from teams import Sizes, play, team

from lbbsp_core import (
    Affine,
    Balancer,
    Ema,
    LastValue,
    Mixture,
    Policy,
    Predictor,
    registry,
)
from lbbsp_core.cost import slowest
from lbbsp_core.runtime.asynchronous.coordinator import Coordinator
from lbbsp_core.runtime.options.defaults import SHORT_STEP_SECONDS
from lbbsp_core.runtime.planning.bounds import BatchBounds
from lbbsp_core.testing import check_plan

INVALID = (0.0, -0.01, math.nan, math.inf, -math.inf)
POLICIES: list[Policy] = [
    component.build() for component in registry.POLICIES.values() if not component.missing
]


def sessions_team(
    workers: int, total: int, *, threshold: float = SHORT_STEP_SECONDS, **options: Any
) -> list[Balancer]:
    """Balancers of all workers, as their sessions make them."""
    bounds = BatchBounds(default_maximum=True, short_step_seconds=threshold)
    return team(workers, total, bounds=bounds, **{"predictor": LastValue(), **options})


@dataclass
class Noise:
    """Disturbances of measured times, seeded: time slices of others, pauses, invalid values."""

    seed: int
    burst_seconds: float = 0.008
    bursts: float = 0.4
    pauses: float = 0.02
    invalid: float = 0.05

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def __call__(self, seconds: float) -> float:
        kind = self.random.random()
        if kind < self.invalid:
            return self.random.choice(INVALID)
        if kind < self.invalid + self.pauses:
            return seconds + self.random.choice([0.1, 2.0, 3600.0])  # a pause, or a clock step
        while self.random.random() < self.bursts:
            seconds += self.burst_seconds * self.random.random()
        return seconds


def disturbed(costs: Sequence[Affine], noise: Noise) -> list[Callable[[int], float]]:
    """Costs whose times are disturbed."""
    return [lambda x, cost=cost: noise(float(cost(x))) for cost in costs]


# Short steps

# As measured: a small Keras model takes as long for 1 sample as for 255.
SHORT = Affine(0.0026, 3e-6)


@pytest.mark.parametrize("predictor", [Mixture(), LastValue()], ids=["default", "last value"])
def test_two_equal_workers_with_short_steps_do_not_swing(predictor: Predictor) -> None:
    def plans(threshold: float) -> list[Sizes]:
        balancers = sessions_team(2, 256, threshold=threshold, predictor=predictor)
        return [*play(balancers, disturbed([SHORT] * 2, Noise(3, invalid=0.0)), 150)]

    near = plans(SHORT_STEP_SECONDS)
    assert max(map(max, plans(0.0))) >= 240, "without bounds a worker gets nearly all samples"
    assert max(map(max, near)) <= 128 * 1.4
    assert 120 <= mean(first for first, _ in near) <= 136


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 8])
def test_bounds_do_not_widen_with_the_number_of_workers(workers: int) -> None:
    """Of many workers, some are always delayed: that makes no speed better known."""
    balancers = sessions_team(workers, 64 * workers, predictor=Ema(0.5))
    mostly_constant = [Affine(0.009, 0.001 / 64)] * workers
    *_, last = play(balancers, disturbed(mostly_constant, Noise(1, invalid=0.0)), 100)
    assert balancers[0].bounds.short_steps.fraction < 0.6
    assert min(last) >= 64 * 0.4
    assert max(last) <= 64 * 1.6


# The loop

CLUSTERS = st.tuples(
    st.lists(st.floats(2e-5, 5e-3), min_size=1, max_size=4),  # seconds per sample
    st.floats(0.0, 0.03),  # overhead
    st.sampled_from([1, 1, 4]),  # granularity
    st.sampled_from([1, 2]),  # lag
    st.integers(0, 2**32),
)


@pytest.mark.slow
@settings(max_examples=8)
@given(CLUSTERS, st.integers(8, 200))
def test_plans_keep_their_sum_the_cap_and_the_bounds_of_short_steps(
    cluster: tuple[list[float], float, int, int, int], share: int
) -> None:
    slopes, overhead, granularity, lag, seed = cluster
    workers, total = len(slopes), share * len(slopes)
    balancers = sessions_team(workers, total, granularity=granularity, lag=lag)
    costs = [Affine(overhead, slope) for slope in slopes]
    for sizes in play(balancers, disturbed(costs, Noise(seed)), 40):
        check_plan(sizes, balancers[0].constraints)
        limits = balancers[0].constraints.limits
        assert workers <= 2 or all(
            each.maximum == -(-2 * share // granularity) * granularity for each in limits
        )
        decided, known = balancers[0].schedule.latest_plan
        if None not in known:
            assert balancers[0].bounds.short_steps.narrow(balancers[0].constraints).allow(decided)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.lists(st.floats(1e-3, 4e-3), min_size=2, max_size=4),
    st.floats(0.0, 0.02),
    st.integers(0, 2**32),
)
def test_plans_return_to_the_optimum_within_sixty_steps(
    slopes: list[float], overhead: float, seed: int
) -> None:
    costs = [Affine(overhead, slope) for slope in slopes]
    balancers = sessions_team(len(slopes), 100 * len(slopes), predictor=Ema(0.5))
    for _ in play(balancers, disturbed(costs, Noise(seed, burst_seconds=0.2)), 40):
        pass
    *_, last = play(balancers, costs, 60)
    constraints = balancers[0].constraints
    best = slowest(costs, constraints.plan(costs))
    assert slowest(costs, last) <= 1.05 * best + max(slopes)


@pytest.mark.slow
@settings(max_examples=5)
@given(st.floats(1e-5, 5e-3), st.integers(0, 2**32))
def test_equal_workers_have_even_shares_in_the_long_run(slope: float, seed: int) -> None:
    costs = [Affine(0.005, slope)] * 3
    balancers = sessions_team(3, 240, predictor=Ema(0.2))
    plans = [*play(balancers, disturbed(costs, Noise(seed, burst_seconds=0.01)), 200)]
    for of_worker in zip(*plans[50:], strict=True):
        assert 80 / 1.25 <= mean(of_worker) <= 80 * 1.25


@pytest.mark.parametrize(
    "policy",
    [policy for policy in POLICIES if not policy.needs_common_steps],
    ids=lambda policy: type(policy).__name__,
)
@pytest.mark.parametrize("name", ["ssp:2", "asp", "dssp:1:3", "elasticbsp:3"])
def test_no_batch_runs_away_without_common_steps(policy: Policy, name: str) -> None:
    constraints = sessions_team(3, 96, policy=policy)[0].constraints
    now = [0.0]
    coordinator = Coordinator(
        registry.SYNCHRONISERS.build(name), constraints, policy, clock=lambda: now[0], logs=False
    )
    noise, choose, done = Noise(1), random.Random(2), [0] * 3
    for _ in range(300):
        ready = [rank for rank in range(3) if coordinator.released[rank] > done[rank]]
        rank = choose.choice(ready)
        begin, end = coordinator.claim(rank, 10**9)
        assert 1 <= end - begin <= 64
        busy = noise(0.001 * 4**rank * (end - begin))
        cost = Affine(0.0, abs(busy)) if math.isfinite(busy) and busy else None
        now[0] += 0.01
        coordinator.push(rank, end - begin, busy, cost, excluded=cost is None)
        if coordinator.entered(rank):
            coordinator.applied()
        done[rank] += 1
