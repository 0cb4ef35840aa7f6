"""Which batches to measure: growth until memory or patience ends, then bisection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from lbbsp_core.cost.fitting import Point

MOST_REPEATS = 100

Step = Callable[[int], float | None]
"""Runs a batch: its seconds, or None where memory ran out."""

Progress = Callable[[str, int, float | None], None]
"""Told what is done ("measured", "probed", "measured again"), a batch, and its seconds; None: it
did not fit."""


class Found(NamedTuple):
    """What a search has measured.

    Args:
        points: By ascending batch.
        out_of_memory_at: The smallest batch that does not fit, or None where all fitted.
        slow: Whether it ended since a step took longer than wanted.
    """

    points: list[Point]
    out_of_memory_at: int | None
    slow: bool


@dataclass(frozen=True, slots=True)
class BatchSweep:
    """How to measure batch sizes.

    Args:
        max_batch: Largest batch to try, in samples, >= 1.
        repeats: Steps of each batch at least, >= 1, after one to warm up.
        point_seconds: Repeats go on until they took so long together (100 at most).
        longest_step: No larger batch is tried after a step took so long, in seconds.
        rounds: How often to measure every batch, all others in between, >= 1. Neighbours on the
            machine only ever add time, and in bursts: the least of the medians counts.
    """

    max_batch: int = 8192
    repeats: int = 5
    point_seconds: float = 0.3
    longest_step: float = 5.0
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("max_batch", "repeats", "rounds"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        for name in ("point_seconds", "longest_step"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name} must be >= 0 seconds, got {value!r}")

    def run(self, step: Step, progress: Progress) -> Found:
        """Measures 1, 2, 3, 4, 6, 8, 12, ... samples, and finds the exact end of memory.

        Returns:
            No points, if not even one sample fits.
        """
        found = self._grow(step, progress)
        points = found.points
        for _ in range(1, self.rounds):
            points = [self._again(step, progress, point) for point in points]
        return found._replace(points=points)

    def _grow(self, step: Step, progress: Progress) -> Found:
        points: list[Point] = []
        for batch in self.batches():
            point = self.measure(step, batch)
            progress("measured", batch, None if point is None else point.seconds)
            if point is None:
                return self._find_end(step, progress, points, batch)
            points.append(point)
            if point.seconds > self.longest_step:
                return Found(points, None, slow=batch < self.max_batch)
        return Found(points, None, slow=False)

    def batches(self) -> Iterator[int]:
        """Powers of two, the middles between them, and the largest batch."""
        batch = 1
        while batch < self.max_batch:
            yield batch
            middle = batch + batch // 2
            if batch < middle < self.max_batch:
                yield middle
            batch *= 2
        yield self.max_batch

    def measure(self, step: Step, batch: int) -> Point | None:
        """The median of many steps; None where memory ran out."""
        if step(batch) is None:  # warms up: tracing, allocation
            return None
        times: list[float] = []
        while len(times) < self.repeats or (
            sum(times) < self.point_seconds and len(times) < MOST_REPEATS
        ):
            seconds = step(batch)
            if seconds is None:
                return None
            times.append(seconds)
        return Point(batch, median(times), len(times))

    def _again(self, step: Step, progress: Progress, point: Point) -> Point:
        """The better of a point and another measurement of it."""
        other = self.measure(step, point.batch)
        if other is None:  # memory is no more what it was: it has been measured
            return point
        progress("measured again", point.batch, other.seconds)
        repeats = point.repeats + other.repeats
        return Point(point.batch, min(point.seconds, other.seconds), repeats)

    def _find_end(self, step: Step, progress: Progress, points: list[Point], bad: int) -> Found:
        """Bisects between the last point and a batch that did not fit; measures the last good."""
        while points and bad - points[-1].batch > 1:
            good = points[-1].batch
            while bad - good > 1:
                middle = (good + bad) // 2
                seconds = _probe(step, middle)
                progress("probed", middle, seconds)
                good, bad = (good, middle) if seconds is None else (middle, bad)
            if good == points[-1].batch:
                break
            point = self.measure(step, good)
            progress("measured", good, None if point is None else point.seconds)
            if point is None:
                bad = good
            else:
                points.append(point)
        return Found(points, bad, slow=False)


def _probe(step: Step, batch: int) -> float | None:
    """Whether a batch fits: twice, since the first step may leave less memory to the second."""
    return None if step(batch) is None else step(batch)
