"""Exponential moving average of speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lbbsp_core.types import Measurement


class EmaState(NamedTuple):
    """The smoothed speed in samples per second, scalar or ``(workers,)``; None at first."""

    speed: Any = None


@dataclass(frozen=True, slots=True)
class Ema:
    r"""``v' = v + alpha (measured - v)``, one of the baselines of arXiv 1806.02508.

    Args:
        alpha: Weight of the newest speed, in (0, 1]; 1 is `LastValue`.

    Raises:
        ValueError: `alpha` outside (0, 1].

    Example:
        >>> ema = Ema(0.5)
        >>> state = ema.update(ema.init(), Measurement(10, 1.0))
        >>> ema.predict(ema.update(state, Measurement(20, 1.0)))
        15.0
    """

    alpha: float = 0.5

    elementwise: ClassVar[bool] = True
    """Whether the arithmetic accepts arrays of shape ``(workers,)``, one worker per element."""

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"Ema.alpha must be in (0, 1], got {self.alpha!r}")

    def init(self) -> EmaState:
        """No speed yet."""
        return EmaState()

    def update(self, state: EmaState, measurement: Measurement) -> EmaState:
        """Moves the average towards the measured speed; the first one is taken whole."""
        speed = measurement.samples_per_second
        if state.speed is None:
            return EmaState(speed)
        return EmaState(state.speed + self.alpha * (speed - state.speed))

    def predict(self, state: EmaState, drivers: tuple[float, ...] = (), horizon: int = 1) -> Any:
        """The average, whatever the horizon; NaN before the first update."""
        return float("nan") if state.speed is None else state.speed
