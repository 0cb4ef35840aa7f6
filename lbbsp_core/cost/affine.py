"""A fixed part an iteration, and seconds in proportion to the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost.base import Segment, pack_one
from lbbsp_core.validate import require_nonnegative, require_positive


@dataclass(frozen=True, slots=True)
class Affine:
    r"""``seconds(x) = c + m x``, i.e. shape ``x + kappa`` with ``kappa = c / m``.

    A fixed part per iteration (kernel launches, Python, the optimizer) makes a pure
    ``x / v`` wrong at small batches: on real GPUs c is worth 3 to 12 samples.

    Args:
        overhead_seconds: c, finite and >= 0.
        seconds_per_sample: m, finite and > 0.

    Example:
        >>> cost = Affine(0.010, 0.001)
        >>> round(cost(20), 6), round(cost.effective_samples(20), 6)
        (0.03, 30.0)
        >>> round(cost.at_speed(500.0)(20), 6)
        0.06
    """

    overhead_seconds: float
    seconds_per_sample: float

    def __post_init__(self) -> None:
        require_nonnegative("Affine.overhead_seconds", self.overhead_seconds)
        require_positive("Affine.seconds_per_sample", self.seconds_per_sample)

    @property
    def overhead_samples(self) -> float:
        """Kappa = overhead / seconds per sample: the overhead expressed in samples."""
        return self.overhead_seconds / self.seconds_per_sample

    @overload
    def __call__(self, x: float) -> float: ...
    @overload
    def __call__(self, x: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]: ...
    def __call__(self, x):  # type: ignore[no-untyped-def]
        """Busy seconds of a batch of `x` samples (a number or an array)."""
        return self.overhead_seconds + self.seconds_per_sample * x

    def effective_samples(self, x: float) -> float:
        """shape(x) = x + kappa."""
        return x + self.overhead_samples

    def at_speed(self, samples_per_second: float) -> Affine:
        """The same kappa at `samples_per_second` of marginal speed."""
        return Affine(self.overhead_samples / samples_per_second, 1.0 / samples_per_second)

    def segments(self) -> tuple[Segment, ...]:
        """One line that starts at the overhead."""
        return ((0, self.overhead_seconds, self.seconds_per_sample),)

    def packed(self) -> bytes:
        """The segment as `allocate` reads it."""
        return pack_one(0.0, self.overhead_seconds, self.seconds_per_sample)
