"""Protocol of a cost: batch size -> busy seconds, and its linear segments."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

Segment = tuple[int, float, float]
"""``(start in samples, seconds at start, seconds per sample)`` of one linear segment."""

_SEGMENT = struct.Struct("3d")
pack_segment = _SEGMENT.pack
SEGMENT_BYTES = _SEGMENT.size
"""Size of one packed segment."""


def pack_segments(segments: Sequence[Segment]) -> bytes:
    """Packs segments as three doubles each.

    `lbbsp_core.allocate` reads packed segments: converting a hundred thousand costs takes half
    of the time of an allocation otherwise.
    """
    return b"".join([_SEGMENT.pack(*segment) for segment in segments])


@runtime_checkable
class Cost(Protocol):
    """Nondecreasing, piecewise linear curve Gamma from batch size to busy seconds."""

    @overload
    def __call__(self, x: float) -> float: ...
    @overload
    def __call__(self, x: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]: ...

    def effective_samples(self, x: float) -> float:
        """Returns shape(x): the work of a batch of `x`, in samples at the marginal speed."""
        ...

    def at_speed(self, samples_per_second: float) -> Cost:
        """Returns the cost of the same shape at another speed: ``shape(x) / speed``."""
        ...

    def segments(self) -> tuple[Segment, ...]:
        """Returns the linear segments: starts ascend from 0, the last one is unbounded."""
        ...


class Curve(ABC):
    """Base of the costs of this package."""

    __slots__ = ()

    @overload
    def __call__(self, x: float) -> float: ...
    @overload
    def __call__(self, x: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]: ...
    def __call__(self, x):  # type: ignore[no-untyped-def]
        """Returns the busy seconds of a batch of `x` samples (a number or an array)."""
        return self._seconds(x)

    def _seconds(self, x: Any) -> Any:
        segments = self.segments()
        if isinstance(x, np.ndarray):
            start, seconds, slope = np.array(segments).T
            index = np.searchsorted(start[1:], x, side="right")
            return seconds[index] + slope[index] * (x - start[index])
        start, seconds, slope = segments[bisect_right(segments, x, lo=1, key=itemgetter(0)) - 1]
        return seconds + slope * (x - start)

    @abstractmethod
    def segments(self) -> tuple[Segment, ...]:
        """Returns the linear segments: starts ascend from 0, the last one is unbounded."""

    def packed_segments(self) -> bytes:
        """Returns the segments in the form that `allocate` reads."""
        return pack_segments(self.segments())
