"""Last value: the memoryless predictor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lbbsp_core.types import Measurement, Real


class LastValueState(NamedTuple):
    """State of `LastValue`.

    Args:
        speed: Last measured samples per second, a scalar or of shape ``(workers,)``; NaN before
            the first measurement.
    """

    speed: Real = math.nan


@dataclass(frozen=True, slots=True)
class LastValue:
    r"""Forecasts the last measured speed: ``v^_(k+h) = v_k`` for every horizon h.

    Paper: the memoryless baseline of LB-BSP.

    Also accepts arrays of shape ``(workers,)`` in a measurement, elementwise.

    Example:
        >>> predictor = LastValue()
        >>> predictor.predict(predictor.update(predictor.init(), Measurement(30, 0.5)))
        60.0

    References:
        Chen, Weng, Wang, Li, Li: Fast Distributed Deep Learning via Worker-adaptive Batch
        Sizing, arXiv 1806.02508, 2018.
    """

    elementwise: ClassVar[bool] = True
    """Whether the arithmetic accepts arrays of shape ``(workers,)``, one worker per element."""

    def init(self) -> LastValueState:
        """Returns the state before the first measurement."""
        return LastValueState()

    def update(self, state: LastValueState, measurement: Measurement) -> LastValueState:
        """Stores the measured speed."""
        return LastValueState(measurement.samples_per_second)

    def predict(
        self, state: LastValueState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> Real:
        """Returns the last measured speed, for every horizon."""
        return state.speed
