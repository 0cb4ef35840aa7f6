"""Proportional control: smoothed times, one proportional step, a dead band."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lbbsp_core.cost import Proportional
from lbbsp_core.policy.base import BatchConstraints, Observation, Sizes
from lbbsp_core.policy.even import Even
from lbbsp_core.types import Limits


class ProportionalControlState(NamedTuple):
    """The plan, what was measured under it, and what was learned about growing.

    Args:
        sizes: The plan in force.
        seconds: mu, smoothed busy seconds since it came into force; 0 before the first.
        steps: Measured under it.
        before: b0, each worker's batch before the last change if that made it grow, else 0.
        speeds: Samples per second of each worker at b0.
        maxima: Learned upper bounds; None where there is none.
    """

    sizes: Sizes
    seconds: tuple[float, ...]
    steps: int
    before: tuple[int, ...]
    speeds: tuple[float, ...]
    maxima: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ProportionalControl:
    r"""Dynamic batching (Tyagi and Sharma, arXiv 2305.12213, closed loop; ACSOS 2020).

    .. math:: x_i' = x_i \, t^* / \mu_i, \qquad t^* = X / \sum_j (x_j / \mu_j)

    with mu_i the exponentially weighted mean of worker i's busy seconds since the last change:
    a proportional controller of the error in time, whose gain is the throughput x_i / mu_i.
    Then limits, then a dead band: all sizes change or none, and only if one of them would by
    more than `dead_band`. If a worker's throughput *drops* after its batch has grown from b0, b0
    becomes its upper bound (a GPU near the end of its memory).

    Paper: t* is the arithmetic mean of mu. We take the above, because that mean does not conserve
    X (batches 10 and 10 that take 1 s and 3 s would become 26.7 samples). Ours, too: a drop must
    exceed `drop`, since noise would cap somebody at every change; bounds under which X cannot be
    reached are forgotten.

    A bound, once learned, stays as long as X can be reached within the bounds; contention that
    comes just after a growth is taken for the end of memory, as in the papers. Where that
    happens set ``drop=1``.

    Args:
        dead_band: Least relative change of a batch, in [0, 1). Paper: 0.05, later 0.2.
        smoothing: Weight of the newest time in mu, in (0, 1].
        interval: Steps measured under a plan before it may change, >= 1.
        drop: Relative loss of throughput that sets a bound, in (0, 1]; 1 never does.

    Raises:
        ValueError: An option out of range.

    Example:
        >>> from lbbsp_core import Limits
        >>> policy = ProportionalControl(interval=1)
        >>> constraints = BatchConstraints(12, (Limits(), Limits()))
        >>> ran = Observation(0, (6, 6), (1.0, 2.0), (), (None, None))
        >>> policy.update(policy.init(constraints), constraints, ran).sizes
        (8, 4)
    """

    uses_costs: ClassVar[bool] = False

    dead_band: float = 0.05
    smoothing: float = 0.5
    interval: int = 3
    drop: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.dead_band < 1:
            raise ValueError(f"dead_band must be in [0, 1), got {self.dead_band!r}")
        for name in ("smoothing", "drop"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)!r}")
        if self.interval < 1 or self.interval != int(self.interval):
            raise ValueError(f"interval must be an integer >= 1, got {self.interval!r}")

    def init(self, constraints: BatchConstraints) -> ProportionalControlState:
        """Even, nothing measured."""
        none = (0,) * constraints.workers
        unknown = (0.0,) * constraints.workers
        sizes = Even().init(constraints).sizes
        return ProportionalControlState(sizes, unknown, 0, none, unknown, (None,) * len(sizes))

    def update(
        self,
        state: ProportionalControlState,
        constraints: BatchConstraints,
        observation: Observation,
    ) -> ProportionalControlState:
        """Smooths the times; every `interval` steps, controls."""
        if observation.sizes != state.sizes:  # a step of an older plan, or a short one
            return state
        state = self._smoothed(state, observation)
        if state.steps % self.interval or not all(state.seconds) or not all(state.sizes):
            return state
        return self._controlled(state, constraints)

    def _smoothed(
        self, state: ProportionalControlState, seen: Observation
    ) -> ProportionalControlState:
        def smooth(rank: int, old: float) -> float:
            if not seen.measured(rank):
                return old
            new = seen.busy_seconds[rank]
            return old + self.smoothing * (new - old) if old else new

        seconds = tuple(smooth(rank, old) for rank, old in enumerate(state.seconds))
        return state._replace(seconds=seconds, steps=state.steps + 1)

    def _controlled(
        self, state: ProportionalControlState, constraints: BatchConstraints
    ) -> ProportionalControlState:
        speeds = tuple(x / mu for x, mu in zip(state.sizes, state.seconds, strict=True))
        sizes, maxima = _plan(constraints, speeds, self._bounds(state, speeds))
        change = max(abs(new - x) / x for new, x in zip(sizes, state.sizes, strict=True))
        if change <= self.dead_band:
            return state._replace(before=(0,) * len(sizes), maxima=maxima)
        grown = tuple(x if new > x else 0 for new, x in zip(sizes, state.sizes, strict=True))
        unknown = (0.0,) * len(sizes)
        return ProportionalControlState(sizes, unknown, 0, grown, speeds, maxima)

    def _bounds(
        self, state: ProportionalControlState, speeds: tuple[float, ...]
    ) -> tuple[int | None, ...]:
        """b0 for whoever lost throughput by growing from it, else what was known."""
        return tuple(
            b0 if b0 and now < (1 - self.drop) * then else known
            for b0, now, then, known in zip(
                state.before, speeds, state.speeds, state.maxima, strict=True
            )
        )


def _plan(
    constraints: BatchConstraints, speeds: tuple[float, ...], maxima: tuple[int | None, ...]
) -> tuple[Sizes, tuple[int | None, ...]]:
    """The plan within the learned bounds, and these; without them where they leave none."""
    costs = [Proportional(speed) for speed in speeds]
    if any(maxima):
        limits = tuple(
            own if most is None else Limits(own.minimum, most)
            for own, most in zip(constraints.limits, maxima, strict=True)
        )
        try:
            return BatchConstraints(
                constraints.global_batch_size, limits, constraints.granularity
            ).plan(costs), maxima
        except ValueError:  # the bounds do not leave room for X
            maxima = (None,) * len(maxima)
    return constraints.plan(costs), maxima
