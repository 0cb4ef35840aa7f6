"""Forecast one worker's cost: a gate, a shape and a predictor over its own measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lbbsp_core.cost.online import Shape, ShapeState
from lbbsp_core.measure import Gate, GateState
from lbbsp_core.predict import Predictor
from lbbsp_core.types import Measurement


class ForecastState(NamedTuple):
    """What is known of a worker, one state for each part."""

    gate: GateState
    shape: ShapeState
    predictor: Any


@dataclass(frozen=True, slots=True)
class Forecaster:
    """Speed fast, shape slowly, outliers never (rules 5 and 7).

    Args:
        predictor: Of the speed in work per second; None where nobody asks for it, and then only
            the gate works.
        shape: Turns samples into work.
        gate: Which measurements the other two learn from.

    Example:
        >>> from lbbsp_core import LastValue, Proportional
        >>> forecaster = Forecaster(LastValue(), Shape(Proportional(), most=50))
        >>> state, admitted = forecaster.learn(forecaster.init(), 100, 0.5)
        >>> admitted, forecaster.predict(state)
        (True, (200.0, 0.0))
    """

    predictor: Predictor | None
    shape: Shape
    gate: Gate = field(default_factory=Gate)

    def init(self) -> ForecastState:
        """Nothing measured yet."""
        predicted = self.predictor.init() if self.predictor else None
        return ForecastState(self.gate.init(), self.shape.init(), predicted)

    def learn(
        self,
        state: ForecastState,
        samples: int,
        busy_seconds: float,
        drivers: tuple[float, ...] = (),
        *,
        held: bool = False,
    ) -> tuple[ForecastState, bool]:
        """Takes in a step of `samples`; says whether it was fit to learn from.

        Args:
            state: What was known before.
            samples: Of the step, >= 1.
            busy_seconds: Alone; anything unusable is held back.
            drivers: Driving factors known before the step began.
            held: True for a step that is not like others.
        """
        gate, admitted = state.gate, False
        measurement = Measurement(self.shape.work(state.shape, samples), busy_seconds, drivers)
        if not held:
            gate, admitted = self.gate.admit(gate, measurement)
        if self.predictor is None:
            return state._replace(gate=gate), admitted
        if not admitted:
            return state._replace(gate=gate, shape=self.shape.skip(state.shape)), False
        shape = self.shape.learn(state.shape, samples, busy_seconds)
        return ForecastState(gate, shape, self.predictor.update(state.predictor, measurement)), True

    def predict(
        self, state: ForecastState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> tuple[float, float]:
        """Work per second, finite and > 0, and kappa; (0, 0) where nothing can be said."""
        if self.predictor is None:
            return 0.0, 0.0
        speed = float(self.predictor.predict(state.predictor, drivers, horizon=horizon))
        return (speed, state.shape.overhead) if 0 < speed < float("inf") else (0.0, 0.0)
