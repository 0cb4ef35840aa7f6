"""Wrappers: what makes any predictor safe to plan with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lbbsp_core.measure import OutlierFilter, OutlierFilterState
from lbbsp_core.predict.base import Predictor
from lbbsp_core.predict.ema import Ema
from lbbsp_core.types import Measurement
from lbbsp_core.validate import require_positive


class ClippedState(NamedTuple):
    """State of the wrapped predictor, and the speeds of the last `window` iterations."""

    inner: Any
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Clipped:
    r"""Keeps a forecast within what was seen: ``min(v) / margin <= v^ <= max(v) * margin``.

    Ours: extrapolating models can leave the range of the speeds that a machine has at all.

    Args:
        predictor: Whose forecast is clipped.
        window: Iterations that count as seen, >= 1.
        margin: Factor, >= 1, by which the range is widened at both ends.

    Raises:
        ValueError: `window` or `margin` below 1.

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
        if self.window < 1 or self.margin < 1:
            raise ValueError(
                f"Clipped.window and margin must be >= 1, got {self.window!r} and {self.margin!r}"
            )

    def init(self) -> ClippedState:
        """Nothing seen."""
        return ClippedState(self.predictor.init())

    def update(self, state: ClippedState, measurement: Measurement) -> ClippedState:
        """Passes the measurement on and remembers its speed, if it is one."""
        inner = self.predictor.update(state.inner, measurement)
        speed = measurement.speed()
        if speed is None:
            return ClippedState(inner, state.speeds)
        seen = (*state.speeds, speed)
        return ClippedState(inner, seen[-self.window :])

    def predict(
        self, state: ClippedState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> float:
        """The wrapped forecast, clipped; a NaN stays NaN."""
        speed = float(self.predictor.predict(state.inner, drivers, horizon))
        if not state.speeds:
            return speed
        least, most = min(state.speeds) / self.margin, max(state.speeds) * self.margin
        return speed if math.isnan(speed) else min(max(speed, least), most)


class FallbackState(NamedTuple):
    """States of both predictors."""

    predictor: Any
    fallback: Any


@dataclass(frozen=True, slots=True)
class Fallback:
    """Forecasts with `predictor`, but with `fallback` where the former makes no sense.

    No sense is: not finite, not positive, or further than `factor` from the fallback's.

    Args:
        predictor: The one that is preferred.
        fallback: A simple one; both are told of everything. Default: a gated EMA.
        factor: Ratio of the two forecasts, > 1, beyond which the preferred one is not believed.

    Raises:
        ValueError: `factor` is 1 or less.

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
        require_positive("Fallback.factor - 1", self.factor - 1)

    def init(self) -> FallbackState:
        """Both at their start."""
        return FallbackState(self.predictor.init(), self.fallback.init())

    def update(self, state: FallbackState, measurement: Measurement) -> FallbackState:
        """Both learn."""
        return FallbackState(
            self.predictor.update(state.predictor, measurement),
            self.fallback.update(state.fallback, measurement),
        )

    def predict(
        self, state: FallbackState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> float:
        """The preferred forecast if it makes sense, else the fallback's."""
        speed = float(self.predictor.predict(state.predictor, drivers, horizon))
        safe = float(self.fallback.predict(state.fallback, drivers, horizon))
        sensible = 0 < speed < math.inf
        if sensible and (math.isnan(safe) or 1 / self.factor <= speed / safe <= self.factor):
            return speed
        return safe


class FilteredState(NamedTuple):
    """State of the wrapped predictor and of the gate, and how many measurements were held."""

    inner: Any
    gate: OutlierFilterState
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class Filtered:
    """Lets only those measurements through that `lbbsp_core.OutlierFilter` believes (rule 7).

    The balancer has a gate of its own; this is for predictors used outside of it.

    Args:
        predictor: Learns from what is let through.
        gate: Decides what that is.

    Example:
        >>> rejected = Filtered(Ema(1.0))
        >>> state = rejected.update(rejected.init(), Measurement(10, 1.0))
        >>> state = rejected.update(state, Measurement(10, float("nan")))
        >>> rejected.predict(state), state.rejected
        (10.0, 1)
    """

    predictor: Predictor
    gate: OutlierFilter = field(default_factory=OutlierFilter)

    def init(self) -> FilteredState:
        """Nothing held."""
        return FilteredState(self.predictor.init(), self.gate.init())

    def update(self, state: FilteredState, measurement: Measurement) -> FilteredState:
        """Learns from a believable measurement, counts any other."""
        gate, accepted = self.gate.accept(state.gate, measurement)
        if not accepted:
            return FilteredState(state.inner, gate, state.rejected + 1)
        return FilteredState(self.predictor.update(state.inner, measurement), gate, state.rejected)

    def predict(
        self, state: FilteredState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> Any:
        """The wrapped forecast."""
        return self.predictor.predict(state.inner, drivers, horizon)
