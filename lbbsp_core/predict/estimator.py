"""Estimates one worker's cost: outlier filter, cost shape and predictor combined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lbbsp_core.cost.online import CostShape, CostShapeState
from lbbsp_core.measure import OutlierFilter, OutlierFilterState
from lbbsp_core.predict.base import Predictor, trained
from lbbsp_core.types import Measurement


class EstimatorState(NamedTuple):
    """State of a `SpeedEstimator`: the states of its parts.

    Args:
        outlier_filter: State of the outlier filter.
        cost_shape: State of the cost shape, with the learned overhead.
        predictor: State of the predictor, opaque to the estimator; None without a predictor.
    """

    outlier_filter: OutlierFilterState
    cost_shape: CostShapeState
    predictor: object


@dataclass(frozen=True, slots=True)
class SpeedEstimator:
    r"""Estimates ``seconds(x) = (w(x) + kappa) / v`` of one worker from its own measurements.

    The speed v is predicted in every iteration; the overhead kappa is learned slowly by the cost
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
    ) -> tuple[EstimatorState, bool]:
        """Learns from one step unless it is excluded or an outlier.

        Busy seconds of None say nothing of the speed; `drivers` are those known before the step.
        Returns the next state, and whether the measurement was accepted.
        """
        if busy_seconds is None or excluded:
            filter_state, accepted = state.outlier_filter, False
        else:
            work = self.cost_shape.effective_samples(state.cost_shape, samples)
            measurement = Measurement(work, busy_seconds, drivers)
            filter_state, accepted = self.outlier_filter.accept(state.outlier_filter, measurement)
        if self.predictor is None:
            return state._replace(outlier_filter=filter_state), accepted
        if busy_seconds is None or not accepted:
            skipped = self.cost_shape.skip(state.cost_shape)
            return state._replace(outlier_filter=filter_state, cost_shape=skipped), False
        learned = self.cost_shape.learn(state.cost_shape, samples, busy_seconds)
        predictor = self.predictor.update(state.predictor, measurement)
        return EstimatorState(filter_state, learned, predictor), True

    @property
    def trains(self) -> bool:
        """Whether `train` may have something to do."""
        return hasattr(self.predictor, "train")

    def train(self, state: EstimatorState) -> EstimatorState:
        """Does what no forecast waits for; else the next `learn` of an accepted step does."""
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
        return (speed, state.cost_shape.overhead) if 0 < speed < float("inf") else (0.0, 0.0)
