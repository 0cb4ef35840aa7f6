"""Dynamic batching: smoothed times, a proportional controller, a dead band."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from lbbsp_core.cost import Proportional
from lbbsp_core.policy.base import Observation, Policy
from lbbsp_core.policy.constraints import BatchConstraints, Sizes
from lbbsp_core.policy.fixed_shares import check_ratings, rated_plan
from lbbsp_core.validate import require_fraction, require_integer, require_share

RATINGS: Final = "ProportionalControl.ratings"


class ProportionalControlState(NamedTuple):
    """Plan in force, the measurements under it, and learned upper bounds.

    Args:
        sizes: Plan in force.
        seconds: mu, smoothed busy time under this plan by rank, in seconds; 0 before the first.
        steps: Steps measured under this plan.
        before: b0, each worker's batch before the last change if that change made it grow, else 0.
        speeds: Samples per second of each worker at b0.
        maxima: Learned upper bounds by rank; None where there is none.
    """

    sizes: Sizes
    seconds: tuple[float, ...]
    steps: int
    before: tuple[int, ...]
    speeds: tuple[float, ...]
    maxima: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ProportionalControl(Policy[ProportionalControlState]):
    r"""Dynamic batching by proportional control (Tyagi and Sharma, arXiv 2305.12213, closed loop).

    .. math:: x_i' = x_i \, t^* / \mu_i, \qquad t^* = X / \sum_j (x_j / \mu_j)

    with mu_i the exponentially weighted mean of worker i's busy seconds since the last change:
    a proportional controller of the error in time, whose gain is the throughput x_i / mu_i.
    Limits are applied next, then a dead band: either all sizes change or none does, and they
    change only if at least one of them would change by more than `dead_band`. If a worker's
    throughput *drops* after its batch has grown from b0, b0 becomes its upper bound (a GPU that
    runs out of memory).

    Paper: t* is the arithmetic mean of mu. Ours: the t* above, because the mean does not conserve
    X (batches 10 and 10 that take 1 s and 3 s would become 26.7 samples). Also ours: a drop must
    exceed `drop`, since noise would otherwise cap a worker at every change; bounds under which X
    cannot be reached are dropped.

    A learned bound stays as long as X can be reached within the bounds. Contention that starts
    just after a batch has grown is mistaken for a lack of memory, as in the papers; set
    ``drop=1`` to disable bounds.

    Paper: the first plan is the open loop, static shares by cores or half-precision FLOP/s
    (`FixedShares`), from which the closed loop starts: give them as `ratings`. Without them the
    first plan is even, and the first adjustment takes their part.

    Args:
        dead_band: Minimum relative change of a batch, in [0, 1). Paper: 0.05; OmniLearn: 0.2.
        smoothing: Weight of the newest time in mu, in (0, 1].
        interval: Steps measured under a plan before it may change, an integer >= 1.
        drop: Relative loss of throughput that sets a bound, in (0, 1]; 1 never does.
        ratings: One positive rating per worker, such as its cores, in whose proportion the first
            plan divides the batch. None: it is even.

    Raises:
        ValueError: An option is out of range.

    Example:
        >>> from lbbsp_core import Limits
        >>> policy = ProportionalControl(interval=1)
        >>> constraints = BatchConstraints(12, (Limits(), Limits()))
        >>> ran = Observation(0, (6, 6), (1.0, 2.0), (), (None, None))
        >>> policy.update(policy.init(constraints), constraints, ran).sizes
        (8, 4)
        >>> ProportionalControl(ratings=(9, 12, 18)).init(
        ...     BatchConstraints(78, (Limits(),) * 3)
        ... ).sizes
        (18, 24, 36)

    References:
        Tyagi, Sharma: Taming Resource Heterogeneity in Distributed ML Training with Dynamic
        Batching, ACSOS 2020, arXiv 2305.12213.
    """

    dead_band: float = 0.05
    smoothing: float = 0.5
    interval: int = 3
    drop: float = 0.5
    ratings: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.ratings is not None:
            object.__setattr__(self, "ratings", check_ratings(RATINGS, self.ratings))
        require_fraction("dead_band", self.dead_band)
        for name in ("smoothing", "drop"):
            require_share(name, getattr(self, name))
        require_integer("interval", self.interval, 1)

    def init(self, constraints: BatchConstraints) -> ProportionalControlState:
        """Returns the plan by ratings, or the even one, with nothing measured.

        Raises:
            ValueError: The number of ratings is not the number of workers.
        """
        none = (0,) * constraints.workers
        unknown = (0.0,) * constraints.workers
        sizes = rated_plan(RATINGS, self.ratings or (1.0,) * constraints.workers, constraints)
        return ProportionalControlState(sizes, unknown, 0, none, unknown, (None,) * len(sizes))

    def update(
        self,
        state: ProportionalControlState,
        constraints: BatchConstraints,
        observation: Observation,
    ) -> ProportionalControlState:
        """Smooths the times; adjusts the plan every `interval` steps."""
        if observation.sizes != state.sizes:  # the step ran with an older plan, or was short
            return state
        pairs = enumerate(zip(state.seconds, observation.busy_seconds, strict=True))
        seconds = tuple(
            self._smoothed(old, new) if observation.measured(rank) else old
            for rank, (old, new) in pairs
        )
        state = state._replace(seconds=seconds, steps=state.steps + 1)
        if state.steps % self.interval or not all(state.seconds) or not all(state.sizes):
            return state
        return self._adjust(state, constraints)

    def _smoothed(self, old: float, new: float) -> float:
        return old + self.smoothing * (new - old) if old else new

    def _adjust(
        self, state: ProportionalControlState, constraints: BatchConstraints
    ) -> ProportionalControlState:
        speeds = tuple(x / mu for x, mu in zip(state.sizes, state.seconds, strict=True))
        costs, maxima = [Proportional(speed) for speed in speeds], self._bounds(state, speeds)
        try:
            sizes = _bounded(constraints, maxima).plan(costs)
        except ValueError:  # X cannot be reached within the bounds
            sizes, maxima = constraints.plan(costs), (None,) * len(maxima)
        change = max(abs(new - x) / x for new, x in zip(sizes, state.sizes, strict=True))
        if change <= self.dead_band:
            return state._replace(before=(0,) * len(sizes), maxima=maxima)
        grown = tuple(x if new > x else 0 for new, x in zip(sizes, state.sizes, strict=True))
        unknown = (0.0,) * len(sizes)
        return ProportionalControlState(sizes, unknown, 0, grown, speeds, maxima)

    def _bounds(
        self, state: ProportionalControlState, speeds: tuple[float, ...]
    ) -> tuple[int | None, ...]:
        """Returns b0 for workers that lost throughput by growing from it, else the known bound."""
        return tuple(
            b0 if b0 and now < (1 - self.drop) * then else bound
            for b0, now, then, bound in zip(
                state.before, speeds, state.speeds, state.maxima, strict=True
            )
        )


def _bounded(constraints: BatchConstraints, maxima: tuple[int | None, ...]) -> BatchConstraints:
    """Returns constraints within learned bounds."""
    bounded = tuple(
        limits if most is None else replace(limits, maximum=min(most, limits.maximum or most))
        for limits, most in zip(constraints.limits, maxima, strict=True)
    )
    return replace(constraints, limits=bounded)
