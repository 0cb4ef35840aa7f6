"""Learn the shape of a cost curve, slowly, while speed is predicted fast (rule 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lbbsp_core.cost import Cost, PiecewiseCost, Segment

Step = tuple[float, float]
"""Marginal work and busy seconds of a step."""


class CostShapeState(NamedTuple):
    """What has been learned.

    Args:
        overhead: kappa, the work of an empty batch, in samples.
        last: The step before, None after one that was not to be learned from.
        weight: Sum of what told kappa, 1 for the prior.
        moment: The same times kappa.
        noise: Running mean of the relative change of speed from one step to the next.
    """

    overhead: float
    last: Step | None
    weight: float
    moment: float
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class CostShape:
    r"""``shape(x) = w(x) + kappa``: the prior's marginal work w and a learned overhead (ours).

    Two steps in a row at work w0 and w1 that take b0 and b1 seconds at the *same* speed satisfy
    ``(w0 + kappa) / b0 = (w1 + kappa) / b1``, that is ``kappa a = c`` with ``a = (b0 - b1) / b``
    and ``c = (w0 b1 - w1 b0) / b``, b their mean. With the relative change of work
    ``z = (w0 - w1) / w`` as the instrument::

        kappa = (prior + sum z c) / (1 + sum z a)

    Fitting overhead and slope freely in closed loop is biased: a slowdown shrinks x at equal
    time, and all looks like overhead. Neighbouring steps see a slowdown *before* x answers to
    it. Small changes of x are left out, below `min_change` or three times the usual change of
    speed: they answer to noise in the very time they would be compared with. The prior counts
    as much as a change of x to nothing.

    Args:
        prior: Its marginal work is kept, its overhead is where kappa begins.
        max_overhead: kappa stays in [0, most] samples; the design's bound is X / 2N.
        min_change: Relative change of work that tells something, > 0.

    Example:
        >>> from lbbsp_core.cost import Proportional
        >>> shape = CostShape(Proportional(), max_overhead=50)
        >>> state = shape.learn(shape.init(), 100, 1.2)       # seconds(x) = (x + 20) / 100
        >>> round(shape.learn(state, 40, 0.6).overhead, 1)    # the prior says 0
        7.3
    """

    prior: Cost
    max_overhead: float
    min_change: float = 0.2

    @staticmethod
    def of(cost: Cost | CostShape, global_batch_size: int, workers: int) -> CostShape:
        """A prior within the design's bound on overhead, unless its own is larger."""
        if isinstance(cost, CostShape):
            return cost
        return CostShape(
            cost,
            max_overhead=max(global_batch_size / (2 * workers), float(cost.effective_samples(0))),
        )

    def init(self) -> CostShapeState:
        """The prior's overhead."""
        overhead = min(max(float(self.prior.effective_samples(0)), 0.0), self.max_overhead)
        return CostShapeState(overhead, None, 1.0, overhead)

    def effective_samples(self, state: CostShapeState, samples: int) -> float:
        """shape(x): the batch expressed in samples of pure marginal work."""
        return self._marginal(samples) + state.overhead

    def marginal(self) -> tuple[Segment, ...]:
        """w(x) as linear pieces, in samples; what `work` counts without overhead."""
        pieces = self.prior.at_speed(1.0).segments()
        least = pieces[0][1]
        return tuple((start, work - least, slope) for start, work, slope in pieces)

    def curve(self, speed: float, overhead: float) -> Cost:
        """``seconds(x) = (w(x) + overhead) / speed``, at a speed > 0."""
        pieces = self.marginal()
        return PiecewiseCost(tuple((x, (w + overhead) / speed, m / speed) for x, w, m in pieces))

    def skip(self, state: CostShapeState) -> CostShapeState:
        """A step that is not like others: nothing can be compared with it."""
        return state._replace(last=None)

    def learn(self, state: CostShapeState, samples: int, busy_seconds: float) -> CostShapeState:
        """Compares a step of `samples` > 0 that took `busy_seconds` > 0 with the one before."""
        new = (self._marginal(samples), busy_seconds)
        if state.last is None:
            return state._replace(last=new)
        change, normal, moment = _equation(state.last, new)
        if abs(change) < max(self.min_change, 3 * state.noise):
            jump = abs(normal - change)  # at constant speed, but for the overhead, they are equal
            return state._replace(last=new, noise=state.noise + 0.1 * (jump - state.noise))
        if change * normal <= 0:  # less work took longer: that is a change of speed
            return state._replace(last=new)
        weight, moment = state.weight + change * normal, state.moment + change * moment
        overhead = min(max(moment / weight, 0.0), self.max_overhead)
        return state._replace(overhead=overhead, last=new, weight=weight, moment=moment)

    def _marginal(self, samples: int) -> float:
        return float(self.prior.effective_samples(samples)) - float(self.prior.effective_samples(0))


def _equation(old: Step, new: Step) -> tuple[float, float, float]:
    """z, a and c of two steps; all zero without marginal work (on a floor of the curve)."""
    (w0, b0), (w1, b1) = old, new
    work, seconds = (w0 + w1) / 2, (b0 + b1) / 2
    if work <= 0:
        return 0.0, 0.0, 0.0
    return (w0 - w1) / work, (b0 - b1) / seconds, (w0 * b1 - w1 * b0) / seconds
