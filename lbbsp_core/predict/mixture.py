"""Mixture: several predictors, weighted by their recent errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lbbsp_core.predict.base import Predictor, trained
from lbbsp_core.predict.ema import Ema
from lbbsp_core.predict.narx import Narx
from lbbsp_core.types import Measurement
from lbbsp_core.validate import require_integer


class MixtureState(NamedTuple):
    """State of `Mixture`.

    Args:
        experts: State of each expert, opaque to the mixture.
        weights: Weight of each expert, >= 0; sums to 1.
        variance: Running mean of the mixture's own squared error in log speed; None before the
            first error.
        pending: Log speeds forecast by each expert for future measurements, oldest first; at
            most `Mixture.horizon` - 1 between updates.
    """

    experts: tuple[object, ...]
    weights: tuple[float, ...]
    variance: float | None = None
    pending: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Mixture:
    r"""Weighs experts by the fixed-share algorithm, on the log speed.

    Ours, after Herbster and Warmuth (1998). The forecast is ``exp(sum_i w_i log v^_i)``. With y
    the new log speed, ``l_i = (y - log v^_i)^2 / s^2`` the loss of expert i and s^2 the mixture's
    own mean squared error (both clipped, so that no single measurement decides)::

        w_i' ~ w_i exp(-eta l_i),   w_i'' = (1 - share) w_i' + share prior_i

    Squared loss is mixable, so the summed loss exceeds that of the best expert, or of any
    sequence of experts that switches seldom, only by a term logarithmic in its prior for each
    switch; `share` makes the mixture forget. The forecast is often better than that of every
    single expert, because their errors average out.

    Args:
        experts: Predictors to combine. Default: `Narx`, `Narx` without drivers and two `Ema`, all
            for `horizon`. One of the averages is fast (0.8), because the slowest worker decides
            a step: lagging behind a jump costs more there than it adds to the mean squared error.
        prior: Initial weight of each expert, and its weight in the redistributed share, > 0;
            scaled to sum to 1. Default: equal; (6, 2, 2, 1) for the default experts.
        horizon: Number of steps ahead at which the errors are compared, >= 1. Experts trained
            for a horizon should be trained for the same one.
        eta: Learning rate of the weights, finite and > 0.
        share: Fraction of the weight redistributed at each update, in [0, 1).

    Raises:
        ValueError: An option is out of range.

    Example:
        >>> mixture = Mixture((Ema(1.0), Ema(0.1)))
        >>> state = mixture.init()
        >>> for k in range(50):                               # a steady climb
        ...     state = mixture.update(state, Measurement(100 + 10 * k, 1.0))
        >>> mixture.leader(state), mixture.predict(state) > 550
        (Ema(alpha=1.0), True)

    References:
        Herbster, Warmuth: Tracking the Best Expert, Machine Learning 32, 1998.
    """

    experts: Sequence[Predictor] = ()
    prior: Sequence[float] = ()
    horizon: int = 1
    eta: float = 0.3
    share: float = 0.01

    def __post_init__(self) -> None:
        require_integer("Mixture.horizon", self.horizon, 1)
        experts, prior = tuple(self.experts), tuple(self.prior)
        if not experts:
            narx = Narx(horizon=self.horizon)
            experts = (narx, replace(narx, use_exogenous=False), Ema(0.8), Ema(0.2))
            prior = prior or (6, 2, 2, 1)
        prior = prior or (1.0,) * len(experts)
        if len(prior) != len(experts) or not all(0 < p < math.inf for p in prior):
            raise ValueError(
                f"Mixture.prior must be {len(experts)} finite numbers > 0, one for each expert, "
                f"got {prior!r}"
            )
        if not 0 < self.eta < math.inf or not 0 <= self.share < 1:
            raise ValueError(
                f"Mixture.eta must be > 0 and share in [0, 1), got {self.eta!r} and {self.share!r}"
            )
        object.__setattr__(self, "experts", experts)
        object.__setattr__(self, "prior", tuple(p / sum(prior) for p in prior))

    def init(self) -> MixtureState:
        """Returns the initial states of the experts, weighted by the prior."""
        return MixtureState(tuple(e.init() for e in self.experts), tuple(self.prior))

    def update(self, state: MixtureState, measurement: Measurement) -> MixtureState:
        """Weighs the experts by their forecasts for this step, then updates each of them.

        Invalid measurements are ignored.
        """
        speed = measurement.speed()
        if speed is None:
            return state
        state, log = self.train(state), math.log(speed)
        pending = (*state.pending, self._logs(state, measurement.drivers, self.horizon))
        weights, variance = state.weights, state.variance
        if len(pending) >= self.horizon:
            weights, variance = self._weigh(weights, variance, pending[0], log)
            pending = pending[1:]
        experts = tuple(
            expert.update(expert_state, measurement)
            for expert, expert_state in zip(self.experts, state.experts, strict=True)
        )
        return MixtureState(experts, weights, variance, pending)

    def predict(
        self, state: MixtureState, drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> float:
        """Returns the weighted forecast of the experts that have one; NaN if none has."""
        return math.exp(_weighted_mean(state.weights, self._logs(state, drivers, horizon)))

    def train(self, state: MixtureState) -> MixtureState:
        """Trains the experts of which a training step is due."""
        pairs = zip(self.experts, state.experts, strict=True)
        return state._replace(experts=tuple(trained(*pair) for pair in pairs))

    def leader(self, state: MixtureState) -> Predictor:
        """Returns the expert with the largest weight, the first one on a tie."""
        return self.experts[max(range(len(self.experts)), key=lambda i: state.weights[i])]

    def _logs(
        self, state: MixtureState, drivers: tuple[float, ...], horizon: int
    ) -> tuple[float, ...]:
        """Returns the log forecast of each expert, NaN for an expert without one."""
        speeds = (
            float(expert.predict(expert_state, drivers, horizon))
            for expert, expert_state in zip(self.experts, state.experts, strict=True)
        )
        return tuple(math.log(v) if 0 < v < math.inf else math.nan for v in speeds)

    def _weigh(
        self,
        weights: tuple[float, ...],
        variance: float | None,
        logs: tuple[float, ...],
        log: float,
    ) -> tuple[tuple[float, ...], float | None]:
        """Returns the experts' weights and the mixture's variance after the `log` speed."""
        mixed = _weighted_mean(weights, logs)
        if math.isnan(mixed):
            return weights, variance
        errors = [(log - (mixed if math.isnan(x) else x)) ** 2 for x in logs]
        square = (log - mixed) ** 2
        if variance is None:
            variance = square
        else:
            variance += 0.05 * (min(square, 16 * variance) - variance)
        losses = [min(error / (variance + 1e-12), 16.0) for error in errors]
        best = min(losses)
        raw = [w * math.exp(self.eta * (best - x)) for w, x in zip(weights, losses, strict=True)]
        if sum(raw) <= 0:  # underflow: only possible with share = 0
            return weights, variance
        kept = (1 - self.share) / sum(raw)
        shared = [self.share * p for p in self.prior]
        return tuple(kept * w + p for w, p in zip(raw, shared, strict=True)), variance


def _weighted_mean(weights: tuple[float, ...], logs: tuple[float, ...]) -> float:
    """Returns the weighted mean of the logs that are not NaN; NaN if there are none."""
    pairs = [(w, x) for w, x in zip(weights, logs, strict=True) if not math.isnan(x)]
    total = sum(w for w, _ in pairs)
    return sum(w * x for w, x in pairs) / total if total > 0 else math.nan
