"""Online learning of a cost's overhead, slow compared with the speed (rule 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lbbsp_core.cost import Cost, PiecewiseCost, Segment

Step = tuple[float, float]
"""Marginal work w in samples, and busy seconds, of one step."""


class CostShapeState(NamedTuple):
    """State of `CostShape`.

    Args:
        overhead: Estimate of kappa, the work of an empty batch, in samples.
        last: Previous step; None if the next step must not be compared with it.
        weight: Denominator of the estimate, ``1 + sum z a``; the 1 is the prior.
        moment: Numerator of the estimate, ``prior + sum z c``.
        noise: Running mean of the relative change of speed between consecutive steps.
    """

    overhead: float
    last: Step | None
    weight: float
    moment: float
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class CostShape:
    r"""Learns the overhead kappa of ``shape(x) = w(x) + kappa``; w is the prior's marginal work.

    Ours. Two consecutive steps of work w0 and w1 that take b0 and b1 seconds at the *same* speed
    satisfy ``(w0 + kappa) / b0 = (w1 + kappa) / b1``, that is ``kappa a = c`` with
    ``a = (b0 - b1) / b`` and ``c = (w0 b1 - w1 b0) / b``, where b is the mean of b0 and b1. With
    the relative change of work ``z = (w0 - w1) / w`` (w the mean of w0 and w1) as the
    instrumental variable::

        kappa = (prior + sum z c) / (1 + sum z a)

    Fitting overhead and slope freely in closed loop is biased: after a slowdown x shrinks at
    equal time, and the difference is attributed to overhead. Between consecutive steps the
    slowdown comes *before* the change of x. Changes of work below `min_change`, or below three
    times the usual change of speed, are ignored, because they are responses to noise in the very
    times that would be compared. The prior has the weight of one change of x to a third (z a = 1).

    Args:
        prior: Cost whose marginal work is kept and whose overhead initialises kappa.
        max_overhead: Upper bound of kappa in samples, >= 0; the design's bound is X / 2N.
        min_change: Smallest relative change of work that is learned from, > 0.

    Example:
        >>> from lbbsp_core.cost import Proportional
        >>> shape = CostShape(Proportional(), max_overhead=50)
        >>> state = shape.learn(shape.init(), 100, 1.2)       # seconds(x) = (x + 20) / 100
        >>> round(shape.learn(state, 40, 0.6).overhead, 1)    # the prior is 0
        7.3
    """

    prior: Cost
    max_overhead: float
    min_change: float = 0.2

    @staticmethod
    def from_cost(cost: Cost | CostShape, global_batch_size: int, workers: int) -> CostShape:
        """Returns `cost` as a prior bounded by X / 2N, or by its own overhead if that is larger.

        Args:
            cost: Prior; a `CostShape` is returned unchanged.
            global_batch_size: X, in samples.
            workers: N.
        """
        if isinstance(cost, CostShape):
            return cost
        overhead = float(cost.effective_samples(0))
        return CostShape(cost, max_overhead=max(global_batch_size / (2 * workers), overhead))

    def init(self) -> CostShapeState:
        """Returns the state with the overhead of the prior."""
        return self.starting_from(float(self.prior.effective_samples(0)))

    def starting_from(self, overhead: float) -> CostShapeState:
        """Returns a state with another overhead than that of the prior, in samples."""
        overhead = min(max(overhead, 0.0), self.max_overhead)
        return CostShapeState(overhead, None, 1.0, overhead)

    def effective_samples(self, state: CostShapeState, samples: float) -> float:
        """Returns shape(x) = w(x) + kappa, in samples."""
        return self._marginal_work(samples) + state.overhead

    def marginal_segments(self) -> tuple[Segment, ...]:
        """Returns the marginal work w(x), in samples, as linear segments: w(0) = 0."""
        segments = self.prior.at_speed(1.0).segments()
        overhead = segments[0][1]
        return tuple((start, work - overhead, slope) for start, work, slope in segments)

    def cost_at(self, speed: float, overhead: float) -> Cost:
        """Returns the cost ``seconds(x) = (w(x) + overhead) / speed``.

        Args:
            speed: Effective samples per second, > 0.
            overhead: kappa, in samples, >= 0.
        """
        segments = self.marginal_segments()
        return PiecewiseCost(tuple((x, (w + overhead) / speed, m / speed) for x, w, m in segments))

    def skip(self, state: CostShapeState) -> CostShapeState:
        """Forgets the previous step, so that the next one is not compared with it."""
        return state._replace(last=None)

    def learn(self, state: CostShapeState, samples: float, busy_seconds: float) -> CostShapeState:
        """Compares a step with the previous one and updates kappa.

        Args:
            state: From `init`, `learn` or `skip`; left unchanged.
            samples: Batch size of the step, or its work in mean samples, > 0.
            busy_seconds: Busy time of the step, in seconds, > 0.

        Returns:
            The next state.
        """
        new = (self._marginal_work(samples), busy_seconds)
        if state.last is None:
            return state._replace(last=new)
        change, normal, moment = _equation(state.last, new)
        if abs(change) < max(self.min_change, 3 * state.noise):
            jump = abs(normal - change)  # equal at constant speed without overhead
            return state._replace(last=new, noise=state.noise + 0.1 * (jump - state.noise))
        if change * normal <= 0:  # less work took longer: the speed has changed
            return state._replace(last=new)
        weight, moment = state.weight + change * normal, state.moment + change * moment
        overhead = min(max(moment / weight, 0.0), self.max_overhead)
        return state._replace(overhead=overhead, last=new, weight=weight, moment=moment)

    def _marginal_work(self, samples: float) -> float:
        return float(self.prior.effective_samples(samples)) - float(self.prior.effective_samples(0))


def _equation(old: Step, new: Step) -> tuple[float, float, float]:
    """Returns z, a and c of two steps; zeros on a flat part of the curve."""
    (w0, b0), (w1, b1) = old, new
    work, seconds = (w0 + w1) / 2, (b0 + b1) / 2
    if work <= 0:
        return 0.0, 0.0, 0.0
    return (w0 - w1) / work, (b0 - b1) / seconds, (w0 * b1 - w1 * b0) / seconds
