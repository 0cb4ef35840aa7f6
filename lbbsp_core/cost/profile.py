"""Profile: a cost measured at some batch sizes, linear in between."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from lbbsp_core.cost.base import Curve, Segment
from lbbsp_core.cost.profile_file import read_points
from lbbsp_core.types import Limits
from lbbsp_core.validate import require_positive

_REMEDY = "measure again with more repeats"


@dataclass(frozen=True, slots=True)
class Profile(Curve):
    r"""Cost through measured points (b_j, t_j), linear in between, nondecreasing.

    Ours. Beyond the last point the line through the last two points continues. Below the first
    point the line through the first two continues, but not below zero seconds at zero samples.
    A single point is extended in proportion.

    The shape is expressed in samples at the speed of the largest measured batch: ``shape(x) =
    b_n t(x) / t_n``, so that ``shape(b_n) = b_n``. (The other forms use the slope at the end,
    which is too noisy here.)

    Args:
        batches: b, integers >= 1, ascending, in samples.
        seconds: t, finite, > 0, nondecreasing; one for each batch.
        out_of_memory_at: Smallest batch, in samples, known to exceed the worker's memory, or
            None. It does not change the curve; see `limits`.

    Raises:
        ValueError: An argument violates these rules; names the value and the remedy.

    Example:
        >>> cost = Profile([8, 16, 32], [0.050, 0.050, 0.090], out_of_memory_at=48)
        >>> [round(cost(x), 6) for x in (4, 24, 64)]
        [0.05, 0.07, 0.17]
        >>> cost.limits()
        Limits(minimum=1, maximum=47, maximum_work=None)
    """

    batches: Sequence[int]
    seconds: Sequence[float]
    out_of_memory_at: int | None = None
    _segments: tuple[Segment, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        batches, seconds = _as_numbers(self.batches, self.seconds)
        _check_points(batches, seconds)
        cap, largest = self.out_of_memory_at, batches[-1]
        if cap is not None and (type(cap) is not int or cap <= largest):
            raise ValueError(
                "Profile.out_of_memory_at must be None or an integer above the largest measured "
                f"batch {largest}, got {cap!r}: remove the batches that do not fit in memory"
            )
        object.__setattr__(self, "batches", batches)
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "_segments", _segments(batches, seconds))

    def effective_samples(self, x: float) -> float:
        """Returns shape(x) = b_n t(x) / t_n."""
        return self(x) * self._speed

    def at_speed(self, samples_per_second: float) -> Profile:
        """Returns the cost of the same shape at `samples_per_second` for the largest batch."""
        require_positive("samples_per_second", samples_per_second)
        factor = self._speed / samples_per_second
        return Profile(self.batches, [t * factor for t in self.seconds], self.out_of_memory_at)

    def segments(self) -> tuple[Segment, ...]:
        """Returns a segment from 0 to the first point, those between points, and one beyond."""
        return self._segments

    @property
    def _speed(self) -> float:
        return self.batches[-1] / self.seconds[-1]

    def limits(self, minimum: int = 1) -> Limits:
        """Returns limits that keep the batch below `out_of_memory_at`."""
        return Limits(minimum, None if self.out_of_memory_at is None else self.out_of_memory_at - 1)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile written by ``lbbsp profile``.

        Raises:
            ValueError: The file is incomplete, has another schema, or its points are invalid;
                names the file, the value and the remedy.
            OSError: The file does not exist or cannot be read.
        """
        batches, seconds, out_of_memory_at = read_points(Path(path))
        try:
            return cls(batches, seconds, out_of_memory_at)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _as_numbers(
    batches: Sequence[int], seconds: Sequence[float]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Converts NumPy arrays and lists to tuples of Python numbers."""
    try:
        integers = tuple(map(operator.index, batches))
    except TypeError:
        raise ValueError(
            f"Profile.batches must be integers, in samples, got {batches!r}: {_REMEDY}"
        ) from None
    try:
        return integers, tuple(map(float, seconds))
    except (TypeError, ValueError):
        raise ValueError(f"Profile.seconds must be numbers, got {seconds!r}: {_REMEDY}") from None


def _check_points(batches: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    if not batches or len(batches) != len(seconds):
        raise ValueError(
            "Profile must have at least one batch and one time for each batch, got "
            f"{len(batches)} batches and {len(seconds)} seconds: pass sequences of equal length"
        )
    if batches[0] < 1:
        raise ValueError(f"Profile.batches must be >= 1, got {batches[0]}: remove it")
    for batch, time in zip(batches, seconds, strict=True):
        if not 0 < time < math.inf:
            raise ValueError(
                f"Profile.seconds must be finite and > 0, got {time!r} at {batch} samples: "
                f"{_REMEDY}"
            )
    for (b, t), (next_b, next_t) in pairwise(zip(batches, seconds, strict=True)):
        if next_b <= b:
            raise ValueError(
                f"Profile.batches must be ascending, got {next_b} after {b}: sort the points "
                "and remove duplicates"
            )
        if next_t < t:
            raise ValueError(
                f"Profile.seconds must be nondecreasing, got {next_t!r} at {next_b} samples "
                f"after {t!r} at {b}: {_REMEDY}"
            )


def _segments(batches: tuple[int, ...], seconds: tuple[float, ...]) -> tuple[Segment, ...]:
    points = list(zip(batches, seconds, strict=True))
    slopes = [(u - t) / (c - b) for (b, t), (c, u) in pairwise(points)]
    b, t = points[0]
    at_zero = max(0.0, t - slopes[0] * b) if slopes else 0.0
    below = (t - at_zero) / b
    slopes.append(slopes[-1] if slopes else below)
    segments = [(b, t, slope) for (b, t), slope in zip(points, slopes, strict=True)]
    return ((0, at_zero, below), *segments)
