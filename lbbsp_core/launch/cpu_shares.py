"""From relative speeds to the share of a core that each worker gets: pure arithmetic.

A worker of speed ``v_i`` gets ``c * v_i`` cores. The factor ``c`` is the same for all workers and
for all stages of a run, so that slowing worker 0 down later leaves the others as fast as they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

MAX_SHARE: Final = 0.95  # of one core: a worker at the full core would not be held to a quota
MAX_LOAD: Final = 0.9  # of all cores: the rest is for the launcher and the system
MIN_QUOTA_US: Final = 1_000  # the kernel refuses less
# With the kernel's default of 100 ms a waiting worker banks its quota. With 5 ms a virtual machine
# on a busy host misses ticks, and the kernel lengthens periods by itself ("period too short").
PERIOD_US: Final = 10_000
LONG_PERIOD_US: Final = 10_000  # beyond this a single training step feels the period: say so
MAX_PERIOD_US: Final = 1_000_000  # the kernel refuses more


class Stage(NamedTuple):
    """The shares of a core, one per worker, from ``seconds`` after the start on."""

    seconds: float
    shares: tuple[float, ...]


class Schedule(NamedTuple):
    """What a throttle has to hold the workers to: the stages in time order and one period."""

    stages: tuple[Stage, ...]
    period_us: int


def schedule(
    speeds: Sequence[float],
    speeds_at: Sequence[tuple[float, Sequence[float]]],
    *,
    workers: int,
    cores: float,
) -> Schedule:
    """Check the speeds of every stage and turn them into shares of a core.

    Args:
        speeds: relative speeds from the start on, one per worker, > 0.
        speeds_at: pairs of seconds since the start (>= 0) and the speeds from then on.
        workers: how many workers there are.
        cores: how many cores they may use together.

    Returns:
        The stages, the first at second 0, and the quota period in microseconds.

    Raises:
        ValueError: for a wrong count, a value that is not positive and finite, or speeds so far
            apart that the slowest worker would fall below what the kernel can measure out.

    Example:
        >>> schedule([1, 0.5], [(30, [0.5, 0.5])], workers=2, cores=2).stages[1].shares
        (0.475, 0.475)
    """
    timed = sorted([(0.0, speeds), *speeds_at], key=lambda stage: check_seconds(stage[0]))
    checked = [(seconds, check_speeds(values, workers)) for seconds, values in timed]
    scale = cores_per_speed([values for _, values in checked], cores)
    stages = tuple(
        Stage(seconds, tuple(scale * speed for speed in values)) for seconds, values in checked
    )
    return Schedule(stages, period_us(min(min(stage.shares) for stage in stages)))


def check_speeds(speeds: Sequence[float], workers: int) -> tuple[float, ...]:
    """Return the speeds as floats, one per worker, each positive and finite."""
    values = tuple(float(speed) for speed in speeds)
    if len(values) != workers:
        raise ValueError(
            f"speeds must hold one value per worker = {workers}, got {len(values)} "
            f"({list(values)}): give {workers} speeds, or start {len(values)} workers"
        )
    for rank, speed in enumerate(values):
        if not (math.isfinite(speed) and speed > 0):
            raise ValueError(
                f"speeds must be positive and finite, got {speed} for worker {rank}: "
                "give each worker's speed relative to the fastest, such as 1,1,0.5"
            )
    return values


def check_seconds(seconds: float) -> float:
    """Return the time of a change of speeds, which must be finite and not before the start."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(
            f"speeds_at must give seconds since the start, finite and >= 0, got {seconds}: "
            "use such as (30.0, [0.5, 1, 1])"
        )
    return float(seconds)


def cores_per_speed(stages: Sequence[Sequence[float]], cores: float) -> float:
    """The factor that keeps every worker within a core, and every stage within the machine."""
    return min(min(MAX_SHARE / max(speeds), MAX_LOAD * cores / sum(speeds)) for speeds in stages)


def period_us(smallest_share: float) -> int:
    """The shortest period, from 10 ms up, in which the slowest worker's quota is 1 ms or more."""
    period = max(PERIOD_US, math.ceil(MIN_QUOTA_US / smallest_share))
    if period > MAX_PERIOD_US:
        raise ValueError(
            f"the slowest worker would get {smallest_share:.2g} of a core, the kernel measures out "
            f"{MIN_QUOTA_US / MAX_PERIOD_US} at least: bring the speeds closer together, "
            "or start fewer workers"
        )
    return period


def quota_us(share: float, period: int) -> int:
    """CPU time per period; a share that just meets the kernel's minimum is not rounded below it."""
    return max(MIN_QUOTA_US, round(share * period))
