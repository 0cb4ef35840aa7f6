"""Linear pieces as they come: what a peer's curve is, once it has crossed an exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost.base import Segment, along


@dataclass(frozen=True, slots=True)
class PiecewiseCost:
    """``seconds(x)`` along given linear pieces; shape(x) is the same number.

    Args:
        pieces: As `Cost.segments` gives them: starts ascend from 0, nothing falls.

    Example:
        >>> cost = PiecewiseCost(((0, 0.050, 0.0), (40, 0.050, 0.001)))
        >>> [round(cost(x), 6) for x in (1, 40, 60)]
        [0.05, 0.05, 0.07]
    """

    pieces: tuple[Segment, ...]

    @overload
    def __call__(self, x: float) -> float: ...
    @overload
    def __call__(self, x: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]: ...
    def __call__(self, x):  # type: ignore[no-untyped-def]
        """Busy seconds of a batch of `x` samples (a number or an array)."""
        return along(self.pieces, x)

    def effective_samples(self, x: float) -> float:
        """shape(x): the pieces count it."""
        return float(self(x))

    def at_speed(self, samples_per_second: float) -> PiecewiseCost:
        """Everything divided by `samples_per_second`."""
        slow = 1.0 / samples_per_second
        return PiecewiseCost(tuple((x, t * slow, m * slow) for x, t, m in self.pieces))

    def segments(self) -> tuple[Segment, ...]:
        """The pieces."""
        return self.pieces
