"""Forecast one worker's cost: a gate, a shape and a predictor over its own measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lbbsp_core.cost.online import CostShape, CostShapeState
from lbbsp_core.measure import OutlierFilter, OutlierFilterState
from lbbsp_core.predict import Predictor
from lbbsp_core.types import Measurement


class EstimatorState(NamedTuple):
    """What is known of a worker, one state for each part."""

    gate: OutlierFilterState
    shape: CostShapeState
    predictor: Any


@dataclass(frozen=True, slots=True)
class SpeedEstimator:
    """Speed fast, shape slowly, outliers never (rules 5 and 7).

    Args:
        predictor: Of the speed in work per second; None where nobody asks for it, and then only
            the gate works.
        shape: Turns samples into work.
        gate: Which measurements the other two learn from.

    Example:
        >>> from lbbsp_core import LastValue, Proportional
        >>> forecaster = SpeedEstimator(LastValue(), CostShape(Proportional(), max_overhead=50))
        >>> state, accepted = forecaster.learn(forecaster.init(), 100, 0.5)
        >>> accepted, forecaster.predict(state)
        (True, (200.0, 0.0))
    """

    predictor: Predictor | None
    shape: CostShape
    gate: OutlierFilter = field(default_factory=OutlierFilter)

    def init(self) -> EstimatorState:
        """Nothing measured yet."""
        predicted = self.predictor.init() if self.predictor else None
        return EstimatorState(self.gate.init(), self.shape.init(), predicted)

    def learn(
        self,
        state: EstimatorState,
        samples: int,
        busy_seconds: float,
        drivers: tuple[float, ...] = (),
        *,
        excluded: bool = False,
    ) -> tuple[EstimatorState, bool]:
        """Takes in a step of `samples`; says whether it was fit to learn from.

        Args:
            state: What was known before.
            samples: Of the step, >= 1.
            busy_seconds: Alone; anything unusable is held back.
            drivers: Driving factors known before the step began.
            excluded: True for a step that is not like others.
        """
        gate, accepted = state.gate, False
        measurement = Measurement(
            self.shape.effective_samples(state.shape, samples), busy_seconds, drivers
        )
        if not excluded:
            gate, accepted = self.gate.accept(gate, measurement)
        if self.predictor is None:
            return state._replace(gate=gate), accepted
        if not accepted:
            return state._replace(gate=gate, shape=self.shape.skip(state.shape)), False
        shape = self.shape.learn(state.shape, samples, busy_seconds)
        return EstimatorState(
            gate, shape, self.predictor.update(state.predictor, measurement)
        ), True

    def predict(
        self, state: EstimatorState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> tuple[float, float]:
        """Work per second, finite and > 0, and kappa; (0, 0) where nothing can be said."""
        if self.predictor is None:
            return 0.0, 0.0
        speed = float(self.predictor.predict(state.predictor, drivers, horizon=horizon))
        return (speed, state.shape.overhead) if 0 < speed < float("inf") else (0.0, 0.0)
