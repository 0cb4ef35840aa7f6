"""The protocol of a cost: batch size -> busy seconds."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

Segment = tuple[int, float, float]
"""``(start in samples, seconds at start, seconds per sample)`` of one linear piece."""

_TRIPLE = struct.Struct("3d")
pack_one = _TRIPLE.pack
SEGMENT_BYTES = _TRIPLE.size
"""Of one packed segment."""


def pack(segments: Sequence[Segment]) -> bytes:
    """Segments as doubles: reading a hundred thousand costs is half of an allocation's time."""
    return b"".join([_TRIPLE.pack(*segment) for segment in segments])


@runtime_checkable
class Cost(Protocol):
    """A nondecreasing, piecewise linear curve from batch size to busy seconds."""

    @overload
    def __call__(self, x: float) -> float: ...
    @overload
    def __call__(self, x: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]: ...

    def effective_samples(self, x: float) -> float:
        """shape(x): the batch expressed in samples of pure marginal work."""
        ...

    def at_speed(self, samples_per_second: float) -> Cost:
        """The same shape at another speed."""
        ...

    def segments(self) -> tuple[Segment, ...]:
        """The curve as linear pieces: starts ascend from 0, the last piece never ends."""
        ...


@overload
def along(pieces: tuple[Segment, ...], x: float) -> float: ...
@overload
def along(pieces: tuple[Segment, ...], x: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]: ...
def along(pieces, x):  # type: ignore[no-untyped-def]
    """Seconds of a batch of `x` samples (a number or an array) on linear pieces."""
    if isinstance(x, np.ndarray):
        start, seconds, slope = np.array(pieces).T
        piece = np.searchsorted(start[1:], x, side="right")
        return seconds[piece] + slope[piece] * (x - start[piece])
    first, then, rise = pieces[bisect_right(pieces, x, lo=1, key=_start) - 1]
    return then + rise * (x - first)


def _start(piece: Segment) -> int:
    return piece[0]
