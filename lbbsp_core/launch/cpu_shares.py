"""Conversion of relative speeds into the share of a core that each worker gets.

A worker of speed ``v_i`` gets ``c * v_i`` cores. The factor ``c`` is the same for all workers and
for all stages of a run: slowing worker 0 down later leaves the speeds of the others unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import starmap
from operator import itemgetter
from typing import Final, NamedTuple

from lbbsp_core.types import is_plausible

MAX_SHARE: Final = 0.95  # of one core: a quota of a full core would not limit a worker
MAX_LOAD: Final = 0.9  # of all cores: the rest is for the launcher and the system
MIN_QUOTA_US: Final = 1_000  # the kernel rejects smaller quotas
# With the kernel's default of 100 ms a waiting worker accumulates unused quota. With 5 ms a virtual
# machine on a busy host misses ticks, and the kernel lengthens periods ("period too short").
PERIOD_US: Final = 10_000
MAX_PERIOD_US: Final = 1_000_000  # the kernel rejects longer periods


class Stage(NamedTuple):
    """Shares of a core, one per worker, in force from ``seconds`` after the start on."""

    seconds: float
    shares: tuple[float, ...]


class Schedule(NamedTuple):
    """Stages in time order, and the quota period in microseconds, which all of them share."""

    stages: tuple[Stage, ...]
    period_us: int

    def of(self, ranks: Sequence[int]) -> Schedule:
        """Returns the schedule of these workers alone, whose shares stay the same."""
        taken = [(s, tuple(shares[rank] for rank in ranks)) for s, shares in self.stages]
        return self._replace(stages=tuple(starmap(Stage, taken)))


def schedule(
    speeds: Sequence[float],
    speeds_at: Sequence[tuple[float, Sequence[float]]],
    *,
    workers: int,
    cores: float,
) -> Schedule:
    """Checks the speeds of every stage and converts them into shares of a core.

    Example:
        >>> schedule([1, 0.5], [(30, [0.5, 0.5])], workers=2, cores=2).stages[1].shares
        (0.475, 0.475)
    """
    for seconds, _ in speeds_at:
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(
                "speeds_at must give seconds since the start, finite and >= 0, got "
                f"{seconds}: use for example (30.0, [0.5, 1, 1])"
            )
    timed = sorted([(0.0, speeds), *speeds_at], key=itemgetter(0))
    checked = [(float(seconds), check_speeds(values, workers)) for seconds, values in timed]
    # The largest factor that fits each worker in a core, and each stage in the machine.
    scale = min(min(MAX_SHARE / max(row), MAX_LOAD * cores / sum(row)) for _, row in checked)
    stages = tuple(Stage(s, tuple(scale * speed for speed in row)) for s, row in checked)
    return Schedule(stages, period_us(min(min(stage.shares) for stage in stages)))


def check_speeds(speeds: Sequence[float], workers: int) -> tuple[float, ...]:
    """Returns the speeds as floats, one per worker, each positive and finite."""
    values = tuple(float(speed) for speed in speeds)
    if len(values) != workers:
        raise ValueError(
            f"speeds must contain one value per worker = {workers}, got {len(values)} "
            f"({list(values)}): give {workers} speeds, or start {len(values)} workers"
        )
    for rank, speed in enumerate(values):
        if not is_plausible(speed):
            raise ValueError(
                f"speeds must be positive, between 1e-12 and 1e12, got {speed} for worker {rank}: "
                "give each worker's speed relative to the fastest, such as 1,1,0.5"
            )
    return values


def period_us(smallest_share: float) -> int:
    """Returns the shortest period, >= 10 ms, in which the slowest worker's quota is >= 1 ms."""
    period = max(PERIOD_US, math.ceil(MIN_QUOTA_US / smallest_share))
    if period > MAX_PERIOD_US:
        raise ValueError(
            f"the slowest worker would get {smallest_share:.2g} of a core, but the kernel's "
            f"smallest quota is {MIN_QUOTA_US / MAX_PERIOD_US} of a core: bring the speeds closer "
            "together, or start fewer workers"
        )
    return period


def quota_us(share: float, period: int) -> int:
    """Returns the CPU time per period in microseconds, at least the kernel's minimum."""
    return max(MIN_QUOTA_US, round(share * period))
