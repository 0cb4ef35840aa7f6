"""Saturating cost: constant until the processor is saturated, then linear."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lbbsp_core.cost.base import Curve, Segment
from lbbsp_core.validate import require_nonnegative, require_positive

_MAX_EXACT = 2**53  # integers up to it are exact in float64


@dataclass(frozen=True, slots=True)
class Saturating(Curve):
    r"""Saturating cost ``seconds(x) = max(t_s, c + m x)``.

    A GPU takes the same time for every batch that leaves some of it idle.

    Paper: the 2018 form of LB-BSP for GPU clusters, t_s while ``x <= x_s``, then ``m x + b``
    until memory runs out. Ours: the maximum of the two, which is the same curve if it is
    continuous and nondecreasing. The memory cap is not part of the curve but a
    `lbbsp_core.Limits.maximum`.

    Args:
        floor_seconds: t_s, finite and >= 0.
        overhead_seconds: c, finite and >= 0.
        seconds_per_sample: m, finite and > 0.

    Example:
        >>> cost = Saturating(0.050, 0.010, 0.001)
        >>> [round(cost(x), 6) for x in (1, 40, 60)]
        [0.05, 0.05, 0.07]
        >>> cost.segments()
        ((0, 0.05, 0.0), (40, 0.05, 0.001))

    References:
        Chen, Weng, Wang, Li, Li: Fast Distributed Deep Learning via Worker-adaptive Batch
        Sizing, arXiv 1806.02508, 2018.
    """

    floor_seconds: float
    overhead_seconds: float
    seconds_per_sample: float
    _segments: tuple[Segment, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_nonnegative("Saturating.floor_seconds", self.floor_seconds)
        require_nonnegative("Saturating.overhead_seconds", self.overhead_seconds)
        require_positive("Saturating.seconds_per_sample", self.seconds_per_sample)
        segments = _segments(self.floor_seconds, self.overhead_seconds, self.seconds_per_sample)
        object.__setattr__(self, "_segments", segments)

    def _seconds(self, x: Any) -> Any:
        line = self.overhead_seconds + self.seconds_per_sample * x
        if isinstance(line, np.ndarray):
            return np.maximum(self.floor_seconds, line)
        return max(self.floor_seconds, line)

    def effective_samples(self, x: float) -> float:
        """Returns shape(x) = max(t_s / m, x + c / m)."""
        m = self.seconds_per_sample
        return max(self.floor_seconds / m, x + self.overhead_seconds / m)

    def at_speed(self, samples_per_second: float) -> Saturating:
        """Returns the cost of the same shape at `samples_per_second` once saturated."""
        m, v = self.seconds_per_sample, samples_per_second
        return Saturating(self.floor_seconds / m / v, self.overhead_seconds / m / v, 1.0 / v)

    def segments(self) -> tuple[Segment, ...]:
        """Returns the floor up to the first integer batch that saturates, then the line."""
        return self._segments


def _segments(floor: float, overhead: float, slope: float) -> tuple[Segment, ...]:
    if overhead >= floor:
        return ((0, overhead, slope),)
    knee = (floor - overhead) / slope
    if knee >= _MAX_EXACT:
        return ((0, floor, 0.0),)
    start = math.ceil(knee)
    return ((0, floor, 0.0), (start, max(floor, overhead + slope * start), slope))
