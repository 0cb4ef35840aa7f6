"""Affine cost: a fixed overhead per iteration plus a constant time per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost.base import Cost, Curve, Segment, pack_segment
from lbbsp_core.types import Floats
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


@dataclass(frozen=True, eq=False)
class AffineArray(Sequence[Affine]):
    """Sequence of `Affine` costs ``seconds_i(x) = c_i + m_i x``, without an object per worker.

    `lbbsp_core.allocate` and `slowest` read the arrays directly, which keeps simulations of ten
    thousand workers fast. All arithmetic is elementwise, so the results are bit-identical to
    those of separate objects.

    Args:
        overhead_seconds: c, finite and >= 0, shape ``(workers,)``.
        seconds_per_sample: m, finite and > 0, shape ``(workers,)``.

    Example:
        >>> lines = AffineArray(np.array([0.0, 0.5]), np.array([0.25, 0.5]))
        >>> lines[1]
        Affine(overhead_seconds=0.5, seconds_per_sample=0.5)
        >>> lines.seconds(np.array([8, 3])).tolist()
        [2.0, 2.0]
    """

    overhead_seconds: Floats
    seconds_per_sample: Floats

    def __len__(self) -> int:
        return len(self.seconds_per_sample)

    def __getitem__(self, rank: Any) -> Any:  # an integer
        return Affine(float(self.overhead_seconds[rank]), float(self.seconds_per_sample[rank]))

    def seconds(self, sizes: npt.ArrayLike) -> Floats:
        """Returns the busy seconds of each worker for batches `sizes`, shape ``(workers,)``."""
        return np.asarray(self.overhead_seconds + self.seconds_per_sample * np.asarray(sizes))


def slowest(costs: Sequence[Cost], sizes: Sequence[int]) -> float:
    """Returns the busy seconds of the slowest worker under a plan, ``max_i Gamma_i(x_i)``.

    Args:
        costs: Gamma_i by rank.
        sizes: x_i by rank, in samples.

    Example:
        >>> slowest([Affine(0.0, 0.5), Affine(1.0, 0.5)], [4, 4])
        3.0
    """
    if isinstance(costs, AffineArray):
        return float(costs.seconds(sizes).max())
    return max(cost(x) for cost, x in zip(costs, sizes, strict=True))


def least_slowest(costs: Sequence[Cost], total: int, minima: Sequence[int]) -> float:
    """Returns a lower bound of `slowest` under every plan of `total` samples.

    It is the time of the slowest worker with its smallest batch, or, for lines, the time at which
    all would end together, ``(X + sum_i c_i / m_i) / sum_i 1 / m_i``, if batches were any real
    numbers.

    Args:
        costs: Gamma_i by rank.
        total: X, the global batch size in samples.
        minima: Smallest batches by rank, in samples.

    Example:
        >>> lines = [Affine(0.0, 0.5), Affine(1.0, 0.5)]
        >>> [round(least_slowest(lines, 8, (1, least)), 6) for least in (1, 7)]
        [2.5, 4.5]
    """
    seconds = slowest(costs, minima)
    if isinstance(costs, AffineArray):
        speeds = 1 / costs.seconds_per_sample
        seconds = max(seconds, float((total + costs.overhead_seconds @ speeds) / speeds.sum()))
    else:
        lines = [segment for cost in costs for segment in cost.segments()]
        if len(lines) == len(costs) and all(slope for *_, slope in lines):
            overhead = sum(least / slope for _, least, slope in lines)
            together = (total + overhead) / sum(1 / slope for *_, slope in lines)
            seconds = max(seconds, together)
    return seconds * (1 - 1e-9)  # rounding


def slowest_instead(
    costs: Sequence[Cost],
    sizes: Sequence[int],
    busy_seconds: Sequence[float],
    *plans: Sequence[int],
) -> list[float]:
    """Returns how long the slowest worker of a step would have been busy with each of other plans.

    Each measured time is scaled by the worker's cost: ``max_i b_i Gamma_i(y_i) / Gamma_i(x_i)``.

    Args:
        costs: Gamma_i by rank.
        sizes: x_i by rank, in samples, > 0.
        busy_seconds: b_i by rank.
        plans: y_i by rank, in samples, of each plan.

    Example:
        >>> slowest_instead([Affine(0.0, 0.5), Affine(1.0, 0.5)], [4, 2], [2.0, 3.0], [2, 4])
        [4.5]
    """
    if isinstance(costs, AffineArray):
        slowness = np.asarray(busy_seconds) / costs.seconds(sizes)
        return [float((slowness * costs.seconds(plan)).max()) for plan in plans]
    slow = [busy / cost(x) for cost, x, busy in zip(costs, sizes, busy_seconds, strict=True)]
    return [
        max(ratio * cost(y) for ratio, cost, y in zip(slow, costs, plan, strict=True))
        for plan in plans
    ]
