"""Piecewise linear cost: the curve of a peer, received through the exchange."""

from __future__ import annotations

from dataclasses import dataclass

from lbbsp_core.cost.base import Curve, Segment


@dataclass(frozen=True, slots=True)
class PiecewiseCost(Curve):
    """Cost given by its linear segments; shape(x) equals ``seconds(x)``.

    Args:
        pieces: Segments in the form of `Cost.segments`: starts ascend from 0, seconds do not
            decrease.

    Example:
        >>> cost = PiecewiseCost(((0, 0.050, 0.0), (40, 0.050, 0.001)))
        >>> [round(cost(x), 6) for x in (1, 40, 60)]
        [0.05, 0.05, 0.07]
    """

    pieces: tuple[Segment, ...]

    def effective_samples(self, x: float) -> float:
        """Returns shape(x), equal to the seconds of `x`."""
        return float(self(x))

    def at_speed(self, samples_per_second: float) -> PiecewiseCost:
        """Returns the cost divided by `samples_per_second`."""
        slowness = 1.0 / samples_per_second
        return PiecewiseCost(tuple((x, t * slowness, m * slowness) for x, t, m in self.pieces))

    def segments(self) -> tuple[Segment, ...]:
        """Returns the segments."""
        return self.pieces
