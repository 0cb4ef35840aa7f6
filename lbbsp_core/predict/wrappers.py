"""Wrappers that make any predictor safe to plan with: `Clipped`, `Fallback`, `Filtered`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from lbbsp_core.measure import OutlierFilter, OutlierFilterState
from lbbsp_core.predict.base import Predictor
from lbbsp_core.predict.ema import Ema
from lbbsp_core.types import Measurement, Real
from lbbsp_core.validate import require_integer


class ClippedState(NamedTuple):
    """State of `Clipped`.

    Args:
        inner: State of the wrapped predictor, opaque to the wrapper.
        speeds: Samples per second of the last `Clipped.window` valid measurements, oldest first.
    """

    inner: object
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Clipped:
    r"""Clips a forecast to the observed range: ``min(v) / margin <= v^ <= max(v) * margin``.

    Ours: models that extrapolate can leave the range of speeds that the machine can reach.

    Args:
        predictor: Predictor whose forecast is clipped.
        window: Number of last iterations that define the range, >= 1.
        margin: Factor, >= 1, that widens the range at both ends.

    Raises:
        ValueError: `window` or `margin` is out of range.

    Example:
        >>> clipped = Clipped(Ema(0.1), window=2)
        >>> state = clipped.init()
        >>> for samples in (10, 40, 40):
        ...     state = clipped.update(state, Measurement(samples, 1.0))
        >>> clipped.predict(state)
        40.0
    """

    predictor: Predictor
    window: int = 300
    margin: float = 1.0

    def __post_init__(self) -> None:
        require_integer("Clipped.window", self.window, 1)
        if self.margin < 1:
            raise ValueError(f"Clipped.margin must be >= 1, got {self.margin!r}")

    def init(self) -> ClippedState:
        """Returns the state before the first measurement."""
        return ClippedState(self.predictor.init())

    def update(self, state: ClippedState, measurement: Measurement) -> ClippedState:
        """Updates the wrapped predictor and stores the speed if the measurement is valid."""
        inner = self.predictor.update(state.inner, measurement)
        speed = measurement.speed()
        if speed is None:
            return ClippedState(inner, state.speeds)
        return ClippedState(inner, (*state.speeds, speed)[-self.window :])

    def predict(
        self, state: ClippedState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> float:
        """Returns the wrapped forecast, clipped; NaN is passed on."""
        speed = float(self.predictor.predict(state.inner, drivers, horizon))
        if not state.speeds or math.isnan(speed):
            return speed
        lowest, highest = min(state.speeds) / self.margin, max(state.speeds) * self.margin
        return min(max(speed, lowest), highest)


class FallbackState(NamedTuple):
    """State of `Fallback`: the states of both predictors, opaque to the wrapper.

    Args:
        predictor: State of the preferred predictor.
        fallback: State of the fallback.
    """

    predictor: object
    fallback: object


@dataclass(frozen=True, slots=True)
class Fallback:
    """Forecasts with `predictor`, or with `fallback` where the preferred forecast is implausible.

    A forecast is implausible if it is not finite, not positive, or differs from the fallback's
    by more than `factor`. Both predictors learn from every measurement.

    Args:
        predictor: Preferred predictor.
        fallback: Simple and robust predictor. Default: an `Ema` behind an outlier filter.
        factor: Largest accepted ratio of the two forecasts, finite and > 1.

    Raises:
        ValueError: `factor` is not finite and > 1.

    Example:
        >>> wrapped = Fallback(Ema(0.1), Ema(1.0), factor=2.0)
        >>> state = wrapped.update(wrapped.init(), Measurement(10, 1.0))
        >>> state = wrapped.update(state, Measurement(100, 1.0))
        >>> wrapped.predict(state)                        # 19.0 is too far from 100.0
        100.0
    """

    predictor: Predictor
    fallback: Predictor = field(default_factory=lambda: Filtered(Ema()))
    factor: float = 10.0

    def __post_init__(self) -> None:
        if not 1 < self.factor < math.inf:
            raise ValueError(f"Fallback.factor must be finite and > 1, got {self.factor!r}")

    def init(self) -> FallbackState:
        """Returns the state before the first measurement."""
        return FallbackState(self.predictor.init(), self.fallback.init())

    def update(self, state: FallbackState, measurement: Measurement) -> FallbackState:
        """Updates both predictors."""
        return FallbackState(
            self.predictor.update(state.predictor, measurement),
            self.fallback.update(state.fallback, measurement),
        )

    def predict(
        self, state: FallbackState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> float:
        """Returns the preferred forecast if it is plausible, otherwise the fallback's."""
        speed = float(self.predictor.predict(state.predictor, drivers, horizon))
        reference = float(self.fallback.predict(state.fallback, drivers, horizon))
        if not 0 < speed < math.inf:
            return reference
        if math.isnan(reference) or 1 / self.factor <= speed / reference <= self.factor:
            return speed
        return reference


class FilteredState(NamedTuple):
    """State of `Filtered`.

    Args:
        inner: State of the wrapped predictor, opaque to the wrapper.
        outlier_filter: State of the outlier filter.
        rejected: Number of measurements rejected so far.
    """

    inner: object
    outlier_filter: OutlierFilterState
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class Filtered:
    """Passes on only measurements that `lbbsp_core.OutlierFilter` accepts (rule 7 of the design).

    The balancer has its own outlier filter; this wrapper is for predictors used without one.

    Args:
        predictor: Predictor that learns from the accepted measurements.
        outlier_filter: Decides which measurements are accepted.

    Example:
        >>> filtered = Filtered(Ema(1.0))
        >>> state = filtered.update(filtered.init(), Measurement(10, 1.0))
        >>> state = filtered.update(state, Measurement(10, float("nan")))
        >>> filtered.predict(state), state.rejected
        (10.0, 1)
    """

    predictor: Predictor
    outlier_filter: OutlierFilter = field(default_factory=OutlierFilter)

    def init(self) -> FilteredState:
        """Returns the state before the first measurement."""
        return FilteredState(self.predictor.init(), self.outlier_filter.init())

    def update(self, state: FilteredState, measurement: Measurement) -> FilteredState:
        """Updates the wrapped predictor if the measurement is accepted, else counts it."""
        filter_state, accepted = self.outlier_filter.accept(state.outlier_filter, measurement)
        if not accepted:
            return FilteredState(state.inner, filter_state, state.rejected + 1)
        inner = self.predictor.update(state.inner, measurement)
        return FilteredState(inner, filter_state, state.rejected)

    def predict(
        self, state: FilteredState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> Real:
        """Returns the wrapped forecast."""
        return self.predictor.predict(state.inner, drivers, horizon)
