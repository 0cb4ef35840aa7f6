"""Last value: the memoryless predictor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lbbsp_core.types import Measurement


class LastValueState(NamedTuple):
    """The last speed in samples per second, scalar or ``(workers,)``; NaN at first."""

    speed: Any = math.nan


@dataclass(frozen=True, slots=True)
class LastValue:
    r"""``v^(k+h) = v^k``: the memoryless baseline of arXiv 1806.02508.

    Example:
        >>> predictor = LastValue()
        >>> predictor.predict(predictor.update(predictor.init(), Measurement(30, 0.5)))
        60.0
    """

    elementwise: ClassVar[bool] = True
    """Whether the arithmetic accepts arrays of shape ``(workers,)``, one worker per element."""

    def init(self) -> LastValueState:
        """No speed yet."""
        return LastValueState()

    def update(self, state: LastValueState, measurement: Measurement) -> LastValueState:
        """Keeps the measured speed."""
        return LastValueState(measurement.samples_per_second)

    def predict(
        self, state: LastValueState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> Any:
        """The last speed, whatever the horizon."""
        return state.speed
