"""Measured points, and straight lines between them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost.base import Segment, along, pack
from lbbsp_core.cost.profile_file import make_document, read_points, write_document
from lbbsp_core.types import Limits
from lbbsp_core.validate import require_positive

_AGAIN = "measure it again, with more repeats"


@dataclass(frozen=True, slots=True)
class Profile:
    r"""Measured points (b_j, t_j), linear in between: a curve of any nondecreasing form.

    Beyond the last point the line through the last two goes on. Below the first one the line
    through the first two does, but not below zero seconds at zero samples. A single point is
    taken for proportional.

    The shape is counted in samples at the pace of the largest measured batch: ``shape(b_n) =
    b_n``. (The slope at the end, which the other forms count by, is too noisy a unit here.)

    Args:
        batches: b, whole samples >= 1, ascending.
        seconds: t, finite, > 0, not falling; one for each batch.
        out_of_memory_at: The smallest batch known to be too large for the worker's memory, or
            None. The curve does not know it; `limits` do.

    Raises:
        ValueError: Anything else; names the value and the cure.

    Example:
        >>> cost = Profile([8, 16, 32], [0.050, 0.050, 0.090], out_of_memory_at=48)
        >>> [round(cost(x), 6) for x in (4, 24, 64)]
        [0.05, 0.07, 0.17]
        >>> cost.limits()
        Limits(minimum=1, maximum=47)
    """

    batches: Sequence[int]
    seconds: Sequence[float]
    out_of_memory_at: int | None = None
    _segments: tuple[Segment, ...] = field(init=False, repr=False, compare=False)
    _packed: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        batches, seconds = _numbers(self.batches, self.seconds)
        _check_points(batches, seconds)
        _check_cap(self.out_of_memory_at, batches[-1])
        object.__setattr__(self, "batches", batches)
        object.__setattr__(self, "seconds", seconds)
        pieces = _pieces(batches, seconds)
        object.__setattr__(self, "_segments", pieces)
        object.__setattr__(self, "_packed", pack(pieces))

    @overload
    def __call__(self, x: float) -> float: ...
    @overload
    def __call__(self, x: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]: ...
    def __call__(self, x):  # type: ignore[no-untyped-def]
        """Busy seconds of a batch of `x` samples (a number or an array)."""
        return along(self._segments, x)

    def effective_samples(self, x: float) -> float:
        """shape(x) = b_n t(x) / t_n."""
        return self(x) * self._pace

    def at_speed(self, samples_per_second: float) -> Profile:
        """The same shape, at `samples_per_second` for the largest measured batch."""
        require_positive("samples_per_second", samples_per_second)
        slower = self._pace / samples_per_second
        return Profile(self.batches, [t * slower for t in self.seconds], self.out_of_memory_at)

    def segments(self) -> tuple[Segment, ...]:
        """A line from 0 to the first point, one from each point to the next, and one beyond."""
        return self._segments

    def packed(self) -> bytes:
        """The segments as `allocate` reads them."""
        return self._packed

    @property
    def _pace(self) -> float:
        return self.batches[-1] / self.seconds[-1]

    def limits(self, minimum: int = 1) -> Limits:
        """Bounds that keep the batch below the one that ran out of memory."""
        return Limits(minimum, None if self.out_of_memory_at is None else self.out_of_memory_at - 1)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads what `save`, or ``lbbsp profile``, has written.

        Raises:
            ValueError: The file is torn, of another schema, or not nondecreasing; names the
                file, the value and the cure.
            OSError: There is no such file, or it cannot be read.
        """
        batches, seconds, out_of_memory_at = read_points(Path(path))
        try:
            return cls(batches, seconds, out_of_memory_at)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def save(self, path: str | Path, *, device: str = "") -> None:
        """Writes the points as a profile that `load` reads, in one piece.

        Args:
            path: Where to; an older file there is replaced.
            device: What was measured, for the reader.
        """
        points = zip(self.batches, self.seconds, strict=True)
        document = make_document(
            device=device,
            points=[{"batch": b, "seconds": t, "repeats": 1} for b, t in points],
            out_of_memory_at=self.out_of_memory_at,
        )
        write_document(Path(path), document)


def _numbers(
    batches: Sequence[int], seconds: Sequence[float]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    try:
        whole = tuple(map(operator.index, batches))
    except TypeError:
        raise ValueError(
            f"Profile.batches must be whole numbers of samples, got {batches!r}: {_AGAIN}"
        ) from None
    try:
        return whole, tuple(map(float, seconds))
    except (TypeError, ValueError):
        raise ValueError(f"Profile.seconds must be numbers, got {seconds!r}: {_AGAIN}") from None


def _check_points(batches: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    if not batches or len(batches) != len(seconds):
        raise ValueError(
            "Profile needs at least one batch, and as many seconds as batches, got "
            f"{len(batches)} batches and {len(seconds)} seconds: give one time for each batch"
        )
    if batches[0] < 1:
        raise ValueError(f"Profile.batches must be >= 1, got {batches[0]}: leave it out")
    for batch, time in zip(batches, seconds, strict=True):
        if not 0 < time < math.inf:
            raise ValueError(
                f"Profile.seconds must be finite and > 0, got {time!r} at {batch} samples: {_AGAIN}"
            )
    for (small, less), (large, more) in pairwise(zip(batches, seconds, strict=True)):
        if large <= small:
            raise ValueError(
                f"Profile.batches must ascend, got {large} after {small}: sort the points, "
                "and keep one of each batch"
            )
        if more < less:
            raise ValueError(
                f"Profile.seconds must not fall as the batch grows, got {more!r} at {large} "
                f"samples after {less!r} at {small}: {_AGAIN}"
            )


def _check_cap(cap: int | None, largest: int) -> None:
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap <= largest):
        raise ValueError(
            "Profile.out_of_memory_at must be None, or a whole number of samples above the "
            f"largest measured batch {largest}, got {cap!r}: leave out the batches that do not fit"
        )


def _pieces(batches: tuple[int, ...], seconds: tuple[float, ...]) -> tuple[Segment, ...]:
    points = list(zip(batches, seconds, strict=True))
    slopes = [(u - t) / (c - b) for (b, t), (c, u) in pairwise(points)]
    b, t = points[0]
    at_zero = max(0.0, t - slopes[0] * b) if slopes else 0.0
    below = (t - at_zero) / b
    slopes.append(slopes[-1] if slopes else below)
    rest = [(b, t, slope) for (b, t), slope in zip(points, slopes, strict=True)]
    return ((0, at_zero, below), *rest)
