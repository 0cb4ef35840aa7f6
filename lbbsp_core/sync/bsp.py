"""BSP: everybody waits for everybody."""

from __future__ import annotations

from dataclasses import dataclass

from lbbsp_core.sync.base import SyncDecision
from lbbsp_core.sync.ssp import SSP, SSPState


@dataclass(frozen=True, slots=True)
class BSP:
    """Bulk synchronous parallel: a barrier in every iteration, one update from all gradients.

    The times are those of ``SSP(0)``, whose state it shares; pushes are kept until the barrier.

    Example:
        >>> bsp = BSP()
        >>> state, decision = bsp.push(bsp.init(2), 0, now=1.0)
        >>> decision
        SyncDecision(aggregate=(), release=())
        >>> state, decision = bsp.push(state, 1, now=3.0)
        >>> decision
        SyncDecision(aggregate=(0, 1), release=(0, 1))
    """

    def init(self, workers: int, now: float = 0.0) -> SSPState:
        """All released."""
        return _IN_STEP.init(workers, now)

    def push(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Keeps the push; with the last one comes the barrier."""
        return _together(state, *_IN_STEP.push(state, worker, now))

    def finish(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """The barrier, if only this worker was missing."""
        return _together(state, *_IN_STEP.finish(state, worker, now))

    def join(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """It takes part in the iteration that runs: the model has not changed since its start."""
        return _IN_STEP.join(state, worker, now)


_IN_STEP = SSP(0)


def _together(
    before: SSPState, after: SSPState, decision: SyncDecision
) -> tuple[SSPState, SyncDecision]:
    """At the barrier one update of all who pushed in this iteration, those who left included."""
    done = after.clocks.least
    if done == before.clocks.least:
        return after, SyncDecision(release=decision.release)
    pushed = tuple(r for r, c in enumerate(after.clocks.counts) if c == done or c == -1 - done)
    return after, SyncDecision(pushed, decision.release)
