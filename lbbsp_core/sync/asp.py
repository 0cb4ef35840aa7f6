"""ASP: no worker waits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lbbsp_core.sync.base import SyncDecision
from lbbsp_core.sync.ssp import SSP, SSPState


@dataclass(frozen=True, slots=True)
class ASP:
    """Asynchronous parallel: each push enters the model on arrival, and its worker proceeds.

    The same as ``SSP(inf)``, whose state it shares.

    Example:
        >>> asp = ASP()
        >>> asp.push(asp.init(2), 0, now=1.0)[1]
        SyncDecision(aggregate=(0,), release=(0,))
    """

    keeps_pushes: ClassVar[bool] = False

    def init(self, workers: int, now: float = 0.0) -> SSPState:
        """Releases all workers."""
        return _UNBOUNDED.init(workers, now)

    def push(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Applies the push and releases the worker."""
        return _UNBOUNDED.push(state, worker, now)

    def finish(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Removes the worker, for which no other waits."""
        return _UNBOUNDED.finish(state, worker, now)

    def join(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Adds the worker and releases it."""
        return _UNBOUNDED.join(state, worker, now)


_UNBOUNDED = SSP(math.inf)
