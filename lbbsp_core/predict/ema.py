"""Exponential moving average of the speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lbbsp_core.types import Measurement, Real
from lbbsp_core.validate import require_share


class EmaState(NamedTuple):
    """State of `Ema`.

    Args:
        speed: Smoothed samples per second, a scalar or of shape ``(workers,)``; None before the
            first measurement.
    """

    speed: Real | None = None


@dataclass(frozen=True, slots=True)
class Ema:
    r"""Smooths the speed exponentially: ``s_k = s_(k-1) + alpha (v_k - s_(k-1))``, ``s_1 = v_1``.

    v_k is the measured speed; s_k is the forecast for every horizon.

    Paper: one of the baselines of LB-BSP. The weight is ours.

    Also accepts arrays of shape ``(workers,)`` in a measurement, elementwise.

    Args:
        alpha: Weight of the newest speed, in (0, 1]; with 1 it equals `LastValue`.

    Raises:
        ValueError: `alpha` is outside (0, 1].

    Example:
        >>> ema = Ema(0.5)
        >>> state = ema.update(ema.init(), Measurement(10, 1.0))
        >>> ema.predict(ema.update(state, Measurement(20, 1.0)))
        15.0

    References:
        Chen, Weng, Wang, Li, Li: Fast Distributed Deep Learning via Worker-adaptive Batch
        Sizing, arXiv 1806.02508, 2018.
    """

    alpha: float = 0.5

    elementwise: ClassVar[bool] = True
    """Whether the arithmetic accepts arrays of shape ``(workers,)``, one worker per element."""

    def __post_init__(self) -> None:
        require_share("Ema.alpha", self.alpha)

    def init(self) -> EmaState:
        """Returns the state before the first measurement."""
        return EmaState()

    def update(self, state: EmaState, measurement: Measurement) -> EmaState:
        """Moves the average towards the measured speed; starts at the first one."""
        speed = measurement.samples_per_second
        if state.speed is None:
            return EmaState(speed)
        return EmaState(state.speed + self.alpha * (speed - state.speed))

    def predict(self, state: EmaState, drivers: tuple[float, ...] = (), horizon: int = 1) -> Real:
        """Returns the average for every horizon; NaN before the first measurement."""
        return float("nan") if state.speed is None else state.speed
