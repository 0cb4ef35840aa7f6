"""A policy and a synchroniser defined outside of lbbsp, which nothing in lbbsp knows of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lbbsp_core import BatchConstraints, Even, Observation, Proportional, SyncDecision
from lbbsp_core.sync.base import require_active, require_inactive, require_running


class RankedState(NamedTuple):
    """State of `Ranked`."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Ranked:
    """Shares 1, r, r^2, ... of the global batch, in the order of predicted speeds.

    Args:
        ratio: r, share of a worker relative to the next faster one, in (0, 1].
    """

    uses_costs: ClassVar[bool] = True
    is_static: ClassVar[bool] = False
    needs_common_steps: ClassVar[bool] = False
    accepts_narrower_limits: ClassVar[bool] = False

    ratio: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], got {self.ratio!r}")

    def init(self, constraints: BatchConstraints) -> RankedState:
        """Returns the even plan."""
        return RankedState(Even().init(constraints).sizes)

    def update(
        self, state: RankedState, constraints: BatchConstraints, observation: Observation
    ) -> RankedState:
        """Orders the workers by their predicted times for the same batch."""
        costs = observation.known_costs()
        if costs is None:
            return state
        batch = constraints.global_batch_size
        order = sorted(range(constraints.workers), key=lambda rank: float(costs[rank](batch)))
        shares = [0.0] * constraints.workers
        for place, rank in enumerate(order):
            shares[rank] = self.ratio**place
        return RankedState(constraints.plan([Proportional(share) for share in shares]))


class PeriodicState(NamedTuple):
    """State of `PeriodicBarrier`.

    Args:
        remaining: Iterations of each worker until the barrier, 0 at the barrier; -1: departed.
        kept: Workers with a kept push.
    """

    remaining: tuple[int, ...]
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class PeriodicBarrier:
    """A barrier every so many iterations; pushes in between enter the model on arrival.

    Args:
        period: Iterations of each worker from barrier to barrier, >= 1.
    """

    keeps_pushes: ClassVar[bool] = True

    period: int = 2

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period must be >= 1, got {self.period!r}")

    def init(self, workers: int, now: float = 0.0) -> PeriodicState:
        """Releases all workers."""
        return PeriodicState((self.period,) * workers)

    def push(
        self, state: PeriodicState, worker: int, now: float
    ) -> tuple[PeriodicState, SyncDecision]:
        """Applies the push, or keeps the last one of a period until the barrier."""
        self._check_active(state, worker)
        require_running(worker, state.remaining[worker] > 0)
        remaining = _replace(state.remaining, worker, state.remaining[worker] - 1)
        if remaining[worker]:
            return PeriodicState(remaining, state.kept), SyncDecision((worker,), (worker,))
        return self._complete(PeriodicState(remaining, tuple(sorted((*state.kept, worker)))))

    def finish(
        self, state: PeriodicState, worker: int, now: float
    ) -> tuple[PeriodicState, SyncDecision]:
        """Removes the worker; completes the barrier if only this worker was missing."""
        self._check_active(state, worker)
        return self._complete(PeriodicState(_replace(state.remaining, worker, -1), state.kept))

    def join(
        self, state: PeriodicState, worker: int, now: float
    ) -> tuple[PeriodicState, SyncDecision]:
        """Adds the worker with as many iterations as the slowest has until the barrier."""
        known = len(state.remaining)
        require_inactive(worker, 0 <= worker < known and state.remaining[worker] >= 0, known)
        slowest = max(state.remaining, default=-1)
        own = slowest if slowest > 0 else self.period
        kept = tuple(other for other in state.kept if other != worker)
        remaining = (*state.remaining, -1)[: max(known, worker + 1)]
        after = PeriodicState(_replace(remaining, worker, own), kept)
        return after, SyncDecision(release=(worker,))

    def _complete(self, state: PeriodicState) -> tuple[PeriodicState, SyncDecision]:
        if max(state.remaining) > 0:
            return state, SyncDecision()
        active = tuple(rank for rank, count in enumerate(state.remaining) if count >= 0)
        remaining = tuple(self.period if count >= 0 else -1 for count in state.remaining)
        return PeriodicState(remaining), SyncDecision(state.kept, active)

    def _check_active(self, state: PeriodicState, worker: int) -> None:
        known = len(state.remaining)
        require_active(worker, 0 <= worker < known and state.remaining[worker] >= 0, known)


def _replace(items: tuple[int, ...], index: int, item: int) -> tuple[int, ...]:
    return (*items[:index], item, *items[index + 1 :])
