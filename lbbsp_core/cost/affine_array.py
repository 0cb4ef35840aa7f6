"""Affine costs of many workers, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost.affine import Affine
from lbbsp_core.cost.base import Cost

Floats = npt.NDArray[np.float64]


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
