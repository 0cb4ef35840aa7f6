"""ASP: nobody waits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lbbsp_core.sync.base import SyncDecision
from lbbsp_core.sync.ssp import SSP, SSPState


@dataclass(frozen=True, slots=True)
class ASP:
    """Asynchronous parallel: each push enters the model on arrival, and its worker goes on.

    ``SSP(inf)``, whose state it shares.

    Example:
        >>> asp = ASP()
        >>> asp.push(asp.init(2), 0, now=1.0)[1]
        SyncDecision(aggregate=(0,), release=(0,))
    """

    def init(self, workers: int, now: float = 0.0) -> SSPState:
        """All released."""
        return _UNBOUNDED.init(workers, now)

    def push(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Applies the push and releases the worker."""
        return _UNBOUNDED.push(state, worker, now)

    def finish(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Nobody cares."""
        return _UNBOUNDED.finish(state, worker, now)

    def join(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """It begins."""
        return _UNBOUNDED.join(state, worker, now)


_UNBOUNDED = SSP(math.inf)
