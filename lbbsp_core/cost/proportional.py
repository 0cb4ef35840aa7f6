"""Seconds in proportion to the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost.base import Segment, pack_one
from lbbsp_core.validate import require_positive


@dataclass(frozen=True, slots=True)
class Proportional:
    """``seconds(x) = x / v``: the paper's CPU form (arXiv 1806.02508, section on CPU clusters).

    Args:
        samples_per_second: Speed v, finite and > 0. The default is a placeholder for a shape
            whose speed is still to be measured.

    Example:
        >>> Proportional(50.0)(10)
        0.2
    """

    samples_per_second: float = 1.0

    def __post_init__(self) -> None:
        require_positive("Proportional.samples_per_second", self.samples_per_second)

    @overload
    def __call__(self, x: float) -> float: ...
    @overload
    def __call__(self, x: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]: ...
    def __call__(self, x):  # type: ignore[no-untyped-def]
        """Busy seconds of a batch of `x` samples (a number or an array)."""
        return x / self.samples_per_second

    def effective_samples(self, x: float) -> float:
        """shape(x) = x."""
        return x

    def at_speed(self, samples_per_second: float) -> Proportional:
        """The same shape at `samples_per_second`."""
        return Proportional(samples_per_second)

    def segments(self) -> tuple[Segment, ...]:
        """One line through the origin."""
        return ((0, 0.0, 1.0 / self.samples_per_second),)

    def packed(self) -> bytes:
        """The segment as `allocate` reads it."""
        return pack_one(0.0, 0.0, 1.0 / self.samples_per_second)
