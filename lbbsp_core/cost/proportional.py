"""Proportional cost: a constant time per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lbbsp_core.cost.base import Curve, Segment, pack_segment
from lbbsp_core.validate import require_positive


@dataclass(frozen=True, slots=True)
class Proportional(Curve):
    """Proportional cost ``seconds(x) = x / v``, with shape x.

    Paper: the form of LB-BSP for CPU clusters.

    Args:
        samples_per_second: Speed v, finite and > 0. The default is a placeholder for a shape
            whose speed is not measured yet.

    Example:
        >>> Proportional(50.0)(10)
        0.2

    References:
        Chen, Weng, Wang, Li, Li: Fast Distributed Deep Learning via Worker-adaptive Batch
        Sizing, arXiv 1806.02508, 2018.
    """

    samples_per_second: float = 1.0

    def __post_init__(self) -> None:
        require_positive("Proportional.samples_per_second", self.samples_per_second)

    def _seconds(self, x: Any) -> Any:
        return x / self.samples_per_second

    def effective_samples(self, x: float) -> float:
        """Returns shape(x) = x."""
        return x

    def at_speed(self, samples_per_second: float) -> Proportional:
        """Returns the cost at `samples_per_second`."""
        return Proportional(samples_per_second)

    def segments(self) -> tuple[Segment, ...]:
        """Returns one segment through the origin."""
        return ((0, 0.0, 1.0 / self.samples_per_second),)

    def packed_segments(self) -> bytes:
        """Returns the segment in the form that `allocate` reads."""
        return pack_segment(0.0, 0.0, 1.0 / self.samples_per_second)
