"""BSP: all workers wait for the slowest in every iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lbbsp_core.sync.base import SyncDecision
from lbbsp_core.sync.ssp import SSP, SSPState


@dataclass(frozen=True, slots=True)
class BSP:
    """Bulk synchronous parallel: a barrier in every iteration, one update from all gradients.

    Times are those of ``SSP(0)``, whose state it shares; pushes are kept until the barrier.

    Example:
        >>> bsp = BSP()
        >>> state, decision = bsp.push(bsp.init(2), 0, now=1.0)
        >>> decision
        SyncDecision(aggregate=(), release=())
        >>> state, decision = bsp.push(state, 1, now=3.0)
        >>> decision
        SyncDecision(aggregate=(0, 1), release=(0, 1))
    """

    keeps_pushes: ClassVar[bool] = True

    def init(self, workers: int, now: float = 0.0) -> SSPState:
        """Releases all workers."""
        return _LOCKSTEP.init(workers, now)

    def push(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Keeps the push; the last push of an iteration completes the barrier."""
        return _aggregate_at_barrier(state, *_LOCKSTEP.push(state, worker, now))

    def finish(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Removes the worker; completes the barrier if only its push was missing."""
        return _aggregate_at_barrier(state, *_LOCKSTEP.finish(state, worker, now))

    def join(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Adds the worker to the current iteration: the model has not changed since its start."""
        return _LOCKSTEP.join(state, worker, now)


_LOCKSTEP = SSP(0)


def _aggregate_at_barrier(
    before: SSPState, after: SSPState, decision: SyncDecision
) -> tuple[SSPState, SyncDecision]:
    """Aggregates, at the barrier, all pushes of the iteration, those of departed workers too."""
    done = after.clocks.min_count
    if done == before.clocks.min_count:
        return after, SyncDecision(release=decision.release)
    pushed = tuple(r for r, c in enumerate(after.clocks.counts) if c == done or c == -1 - done)
    return after, SyncDecision(pushed, decision.release)
