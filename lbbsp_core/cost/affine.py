"""Affine cost: a fixed overhead per iteration plus a constant time per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lbbsp_core.cost.base import Curve, Segment, pack_segment
from lbbsp_core.validate import require_nonnegative, require_positive


@dataclass(frozen=True, slots=True)
class Affine(Curve):
    r"""Affine cost ``seconds(x) = c + m x``, with shape ``x + kappa`` and ``kappa = c / m``.

    Ours: the fixed overhead of an iteration (kernel launches, Python, the optimizer) makes the
    paper's ``x / v`` wrong at small batches. On measured GPUs c is worth 3 to 12 samples.

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
        """Overhead in samples, ``kappa = c / m``."""
        return self.overhead_seconds / self.seconds_per_sample

    def _seconds(self, x: Any) -> Any:
        return self.overhead_seconds + self.seconds_per_sample * x

    def effective_samples(self, x: float) -> float:
        """Returns shape(x) = x + kappa."""
        return x + self.overhead_samples

    def at_speed(self, samples_per_second: float) -> Affine:
        """Returns the cost with the same kappa at a marginal speed of `samples_per_second`."""
        return Affine(self.overhead_samples / samples_per_second, 1.0 / samples_per_second)

    def segments(self) -> tuple[Segment, ...]:
        """Returns one segment that starts at the overhead."""
        return ((0, self.overhead_seconds, self.seconds_per_sample),)

    def packed_segments(self) -> bytes:
        """Returns the segment in the form that `allocate` reads."""
        return pack_segment(0.0, self.overhead_seconds, self.seconds_per_sample)
