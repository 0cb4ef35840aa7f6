"""Mixture: several predictors, weighted by how well each has done lately."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lbbsp_core.predict.base import Predictor
from lbbsp_core.predict.ema import Ema
from lbbsp_core.predict.narx import Narx
from lbbsp_core.types import Measurement


class MixtureState(NamedTuple):
    """States and weights of the experts.

    Args:
        experts: State of each.
        weights: Non-negative, summing to 1.
        variance: Running mean of the mixture's own squared error in log speed; None at first.
        pending: Log speeds forecast by each expert for measurements still to come, oldest first.
    """

    experts: tuple[Any, ...]
    weights: tuple[float, ...]
    variance: float | None = None
    pending: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Mixture:
    r"""Fixed-share weights over experts, in log speed (ours; Herbster and Warmuth, 1998).

    The forecast is ``exp(sum_i w_i log v^_i)``. With the new log speed y and l_i the squared error
    of expert i over the mixture's own mean squared error s^2 (both clipped, so that no single
    measurement decides)::

        w_i' ~ w_i exp(-eta l_i),   w_i'' = (1 - share) w_i' + share prior_i

    Squared loss is mixable, so the summed loss exceeds that of the best expert, or of any
    sequence of experts that switches seldom, by a term logarithmic in its prior for each switch;
    `share` is what makes it forget. The forecast is often better than each expert's, because
    errors average out.

    Args:
        experts: Predictors. Default: NARX, NARX without drivers and two EMAs, for `horizon`. A
            fast EMA (0.8) because the slowest worker decides a step: what lags behind a jump
            costs more there than it adds to the mean squared error.
        prior: Weight of each at the start and in what is shared, > 0; scaled to sum to 1.
            Default: equal; (6, 2, 2, 1) for the default experts.
        horizon: The horizon whose errors decide, >= 1. Experts trained for a horizon should have
            the same.
        eta: Learning rate, > 0.
        share: Redistributed at each update, in [0, 1).

    Raises:
        ValueError: No experts, or an option out of range.

    Example:
        >>> mixture = Mixture((Ema(1.0), Ema(0.1)))
        >>> state = mixture.init()
        >>> for k in range(50):                               # a steady climb
        ...     state = mixture.update(state, Measurement(100 + 10 * k, 1.0))
        >>> mixture.leader(state), mixture.predict(state) > 550
        (Ema(alpha=1.0), True)
    """

    experts: Sequence[Predictor] = ()
    prior: Sequence[float] = ()
    horizon: int = 1
    eta: float = 0.3
    share: float = 0.01

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ValueError(f"Mixture.horizon must be >= 1, got {self.horizon!r}")
        experts, prior = tuple(self.experts), tuple(self.prior)
        if not experts:
            narx = Narx(horizon=self.horizon)
            experts = (narx, replace(narx, use_exogenous=False), Ema(0.8), Ema(0.2))
            prior = prior or (6, 2, 2, 1)
        prior = prior or (1.0,) * len(experts)
        if len(prior) != len(experts) or not all(0 < p < math.inf for p in prior):
            raise ValueError(
                f"Mixture.prior must be {len(experts)} positive numbers, one for each expert, got "
                f"{prior!r}"
            )
        if not 0 < self.eta < math.inf or not 0 <= self.share < 1:
            raise ValueError(
                f"Mixture.eta must be > 0 and share in [0, 1), got {self.eta!r} and {self.share!r}"
            )
        object.__setattr__(self, "experts", experts)
        object.__setattr__(self, "prior", tuple(p / sum(prior) for p in prior))

    def init(self) -> MixtureState:
        """The prior's weights."""
        return MixtureState(tuple(e.init() for e in self.experts), tuple(self.prior))

    def update(self, state: MixtureState, measurement: Measurement) -> MixtureState:
        """Weighs by the forecasts made `horizon` updates ago; then every expert learns."""
        speed = measurement.speed()
        if speed is None:
            return state
        log = math.log(speed)
        pending = (*state.pending, self._logs(state, measurement.drivers, self.horizon))
        weights, variance = state.weights, state.variance
        if len(pending) >= self.horizon:
            weights, variance = self._weigh(weights, variance, pending[0], log)
            pending = pending[1:]
        experts = tuple(
            expert.update(own, measurement)
            for expert, own in zip(self.experts, state.experts, strict=True)
        )
        return MixtureState(experts, weights, variance, pending)

    def predict(
        self, state: MixtureState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> float:
        """The weighted forecast; experts without one are left out."""
        return math.exp(_mean(state.weights, self._logs(state, drivers, horizon)))

    def leader(self, state: MixtureState) -> Predictor:
        """The expert with the largest weight, the first of equals."""
        return self.experts[max(range(len(self.experts)), key=lambda i: state.weights[i])]

    def _logs(
        self, state: MixtureState, drivers: tuple[float, ...], horizon: int
    ) -> tuple[float, ...]:
        """Log forecast of each expert, NaN where it has none."""
        speeds = (
            float(expert.predict(own, drivers, horizon))
            for expert, own in zip(self.experts, state.experts, strict=True)
        )
        return tuple(math.log(v) if 0 < v < math.inf else math.nan for v in speeds)

    def _weigh(
        self,
        weights: tuple[float, ...],
        variance: float | None,
        logs: tuple[float, ...],
        log: float,
    ) -> tuple[tuple[float, ...], float | None]:
        mixed = _mean(weights, logs)
        if math.isnan(mixed):
            return weights, variance
        errors = [(log - (mixed if math.isnan(x) else x)) ** 2 for x in logs]
        own = (log - mixed) ** 2
        variance = (
            own if variance is None else variance + 0.05 * (min(own, 16 * variance) - variance)
        )
        losses = [min(error / (variance + 1e-12), 16.0) for error in errors]
        least = min(losses)
        raw = [w * math.exp(self.eta * (least - x)) for w, x in zip(weights, losses, strict=True)]
        if sum(raw) <= 0:  # whoever had any weight has failed, and nothing is shared
            return weights, variance
        kept = (1 - self.share) / sum(raw)
        shared = [self.share * p for p in self.prior]
        return tuple(kept * w + p for w, p in zip(raw, shared, strict=True)), variance


def _mean(weights: tuple[float, ...], logs: tuple[float, ...]) -> float:
    """Weighted mean of the logs that are there; NaN if there are none."""
    pairs = [(w, x) for w, x in zip(weights, logs, strict=True) if not math.isnan(x)]
    total = sum(w for w, _ in pairs)
    return sum(w * x for w, x in pairs) / total if total > 0 else math.nan
