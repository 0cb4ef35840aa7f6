"""Estimates one worker's cost: outlier filter, cost shape and predictor combined."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from lbbsp_core.cost.online import CostShape, CostShapeState
from lbbsp_core.measure import OutlierFilter, OutlierFilterState
from lbbsp_core.predict.base import Predictor, trained
from lbbsp_core.types import Measurement

SLOWEST = 1e-6
"""Smallest speed that is believed, in samples per second: one in eleven days."""


def is_speed(forecast: float) -> bool:
    """Returns whether a forecast is a speed that a plan can follow."""
    return SLOWEST <= forecast < math.inf


class Span(NamedTuple):
    """Consecutive steps that are one measurement, so far.

    Args:
        steps: Their number, without those that are excluded or outliers.
        samples: Sum of their batch sizes.
        busy_seconds: Sum of their busy times.
    """

    steps: int = 0
    samples: float = 0.0
    busy_seconds: float = 0.0


class EstimatorState(NamedTuple):
    """State of a `SpeedEstimator`: the states of its parts.

    Args:
        outlier_filter: State of the outlier filter.
        cost_shape: State of the cost shape, with the learned overhead.
        predictor: State of the predictor, opaque to the estimator; None without a predictor.
        span: Steps since the last measurement.
    """

    outlier_filter: OutlierFilterState
    cost_shape: CostShapeState
    predictor: object
    span: Span = Span()


@dataclass(frozen=True, slots=True)
class SpeedEstimator:
    r"""Estimates ``seconds(x) = (w(x) + kappa) / v`` of one worker from its own measurements.

    The speed v is predicted for each plan; the overhead kappa is learned slowly by the cost
    shape (rule 5 of the design). Outliers reach neither of them (rule 7).

    Args:
        predictor: Forecasts v in effective samples per second; None for a policy that needs no
            costs, in which case only the outlier filter runs.
        cost_shape: Converts a batch size to effective samples ``w(x) + kappa``.
        outlier_filter: Selects the measurements that the predictor and the cost shape learn from.

    Example:
        >>> from lbbsp_core import LastValue, Proportional
        >>> estimator = SpeedEstimator(LastValue(), CostShape(Proportional(), max_overhead=50))
        >>> state, accepted = estimator.learn(estimator.init(), 100, 0.5)
        >>> accepted, estimator.predict(state)
        (True, (200.0, 0.0))
    """

    predictor: Predictor | None
    cost_shape: CostShape
    outlier_filter: OutlierFilter = field(default_factory=OutlierFilter)

    def init(self) -> EstimatorState:
        """Returns the state before the first measurement."""
        predictor = self.predictor.init() if self.predictor else None
        return EstimatorState(self.outlier_filter.init(), self.cost_shape.init(), predictor)

    def learn(
        self,
        state: EstimatorState,
        samples: float,
        busy_seconds: float | None,
        drivers: tuple[float, ...] = (),
        *,
        excluded: bool = False,
        ends_span: bool = True,
    ) -> tuple[EstimatorState, bool]:
        """Learns from one step unless it is excluded or an outlier.

        Returns the next state, and whether the step was accepted.

        Args:
            state: From `init` or `learn`; left unchanged.
            samples: Batch size of the step, or its work in mean samples.
            busy_seconds: Busy time of the step; None says nothing of the speed.
            drivers: Driving factors known before the first step of the span.
            excluded: Whether the step is excluded.
            ends_span: Whether to learn from the mean of the steps since the last measurement; if
                not, the next step is added to them.
        """
        accepted = False
        if busy_seconds is not None and not excluded:
            work = self.cost_shape.effective_samples(state.cost_shape, samples)
            filter_state, accepted = self.outlier_filter.accept(
                state.outlier_filter, Measurement(work, busy_seconds)
            )
            state = state._replace(outlier_filter=filter_state)
        if self.predictor is None:
            return state, accepted
        span = state.span
        if busy_seconds is not None and accepted:
            span = Span(span.steps + 1, span.samples + samples, span.busy_seconds + busy_seconds)
        if not ends_span:
            return state._replace(span=span), accepted
        if not span.steps:
            return state._replace(cost_shape=self.cost_shape.skip(state.cost_shape)), False
        samples, busy_seconds = span.samples / span.steps, span.busy_seconds / span.steps
        work = self.cost_shape.effective_samples(state.cost_shape, samples)
        predictor = self.predictor.update(state.predictor, Measurement(work, busy_seconds, drivers))
        learned = self.cost_shape.learn(state.cost_shape, samples, busy_seconds)
        return EstimatorState(state.outlier_filter, learned, predictor), accepted

    def trains(self, state: EstimatorState) -> bool:
        """Returns whether `train` may have something to do."""
        return not state.span.steps and hasattr(self.predictor, "train")

    def train(self, state: EstimatorState) -> EstimatorState:
        """Does what no forecast waits for; else the next measurement does."""
        if self.predictor is None:
            return state
        return state._replace(predictor=trained(self.predictor, state.predictor))

    def predict(
        self, state: EstimatorState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> tuple[float, float]:
        """Forecasts the speed `horizon` steps ahead, and kappa in samples; both 0 if unknown."""
        if self.predictor is None:
            return 0.0, 0.0
        speed = float(self.predictor.predict(state.predictor, drivers, horizon=horizon))
        return (speed, state.cost_shape.overhead) if is_speed(speed) else (0.0, 0.0)
