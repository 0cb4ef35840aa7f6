"""Selection of the batch sizes to measure: growth up to a limit, then bisection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeAlias

from lbbsp_core.cost.fitting import Point
from lbbsp_core.validate import require_integer

MAX_REPEATS = 100

Step: TypeAlias = Callable[[int], float | None]
"""Runs a step on a batch and returns its seconds, or None if memory ran out."""

Progress: TypeAlias = Callable[[str, int, float | None], None]
"""Called with an activity ("measured", "probed" or "measured again"), a batch size, and the step's
seconds, or None if memory ran out."""


class SweepResult(NamedTuple):
    """Measurements of a sweep."""

    points: list[Point]  # by ascending batch
    out_of_memory_at: int | None  # smallest batch that does not fit in memory
    slow: bool  # it ended early, because a step took longer than `longest_step`


@dataclass(frozen=True, slots=True)
class BatchSweep:
    """Measures the step's seconds for growing batch sizes, and the largest batch that fits.

    Args:
        max_batch: Largest batch to try, in samples, >= 1.
        repeats: Minimum number of timed steps per batch, >= 1, after one warm-up step.
        point_seconds: Minimum total seconds of the timed steps per batch (100 steps at most).
        longest_step: Seconds of a step after which no larger batch is tried.
        rounds: Number of times that every batch is measured, with all others in between, >= 1.
            Other load on the machine only adds time, in bursts, so the smallest median is kept.
    """

    max_batch: int = 8192
    repeats: int = 5
    point_seconds: float = 0.3
    longest_step: float = 5.0
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("max_batch", "repeats", "rounds"):
            require_integer(name, getattr(self, name), 1)
        for name in ("point_seconds", "longest_step"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0 seconds, got {getattr(self, name)!r}")

    def run(self, step: Step, progress: Progress) -> SweepResult:
        """Measures 1, 2, 3, 4, 6, 8, 12, ... samples, and finds the exact memory limit.

        Args:
            step: Runs one step.
            progress: Called after each batch.

        Returns:
            The measurements, without points if a single sample does not fit.
        """
        points: list[Point] = []
        bad, is_slow = None, False
        for batch in self.batches():
            point = self._measure(step, progress, batch)
            if point is None:
                bad = self._find_memory_limit(step, progress, points, batch)
                break
            points.append(point)
            if point.seconds > self.longest_step:
                is_slow = batch < self.max_batch
                break
        for _ in range(1, self.rounds):
            points = [self._measure_again(step, progress, point) for point in points]
        return SweepResult(points, bad, is_slow)

    def batches(self) -> Iterator[int]:
        """Yields powers of two, the midpoints between them, and the largest batch."""
        batch = 1
        while batch < self.max_batch:
            yield batch
            midpoint = batch + batch // 2
            if batch < midpoint < self.max_batch:
                yield midpoint
            batch *= 2
        yield self.max_batch

    def _measure(self, step: Step, progress: Progress, batch: int) -> Point | None:
        """Returns the median of repeated steps and reports it; None if memory ran out."""
        point = self._median(step, batch)
        progress("measured", batch, None if point is None else point.seconds)
        return point

    def _measure_again(self, step: Step, progress: Progress, point: Point) -> Point:
        """Returns the point with the smaller of its seconds and those of another measurement."""
        other = self._median(step, point.batch)
        if other is None:  # less memory is free than before: keep the earlier measurement
            return point
        progress("measured again", point.batch, other.seconds)
        repeats = point.repeats + other.repeats
        return Point(point.batch, min(point.seconds, other.seconds), repeats)

    def _median(self, step: Step, batch: int) -> Point | None:
        times: list[float] = []
        seconds = step(batch)  # warm-up: tracing, allocation
        while len(times) < self.repeats or (
            sum(times) < self.point_seconds and len(times) < MAX_REPEATS
        ):
            if seconds is None or (seconds := step(batch)) is None:
                return None
            times.append(seconds)
        return Point(batch, median(times), len(times))

    def _find_memory_limit(
        self, step: Step, progress: Progress, points: list[Point], bad: int
    ) -> int:
        """Bisects between the last point and a batch that did not fit; measures the largest one."""
        while points and bad - points[-1].batch > 1:
            good = points[-1].batch
            while bad - good > 1:
                midpoint = (good + bad) // 2
                # twice, because the first step may leave less memory for the second
                seconds = None if step(midpoint) is None else step(midpoint)
                progress("probed", midpoint, seconds)
                good, bad = (good, midpoint) if seconds is None else (midpoint, bad)
            if good == points[-1].batch:
                break
            if (point := self._measure(step, progress, good)) is None:
                bad = good
            else:
                points.append(point)
        return bad
