"""BSP: all workers wait for the slowest in every iteration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from lbbsp_core.sync.base import SyncDecision
from lbbsp_core.sync.ssp import SSP, SSPState


@dataclass(frozen=True, slots=True)
class BSP(SSP):
    """Bulk synchronous parallel: a barrier in every iteration, one update from all gradients.

    As ``SSP(0)``, but pushes are kept until the barrier.

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
    ends_together: ClassVar[bool] = True  # every iteration, on all workers: they may share its work
    staleness: float = field(default=0, init=False, repr=False)

    def push(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Keeps the push; the last push of an iteration completes the barrier."""
        return _aggregate_at_barrier(state, *SSP.push(self, state, worker, now))

    def finish(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Removes the worker; completes the barrier if only its push was missing."""
        return _aggregate_at_barrier(state, *SSP.finish(self, state, worker, now))


def _aggregate_at_barrier(
    before: SSPState, after: SSPState, decision: SyncDecision
) -> tuple[SSPState, SyncDecision]:
    """Aggregates, at the barrier, all pushes of the iteration, those of departed workers too."""
    done = after.clocks.min_count
    if done == before.clocks.min_count:
        return after, SyncDecision(release=decision.release)
    pushed = tuple(r for r, c in enumerate(after.clocks.counts) if c == done or c == -1 - done)
    return after, SyncDecision(pushed, decision.release)
