"""SSP: nobody gets too far ahead of the slowest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lbbsp_core.sync.base import SyncDecision, require_running
from lbbsp_core.sync.clocks import Clocks
from lbbsp_core.validate import require_integer


class SSPState(NamedTuple):
    """How far everybody is."""

    clocks: Clocks


@dataclass(frozen=True, slots=True)
class SSP:
    r"""Stale synchronous parallel: start clock ``c_p`` iff ``c_p - min c <= s``.

    c_p is the number of iterations that worker p has pushed. Each push enters the model on
    arrival. With s = 0 everybody waits for everybody, at BSP's times (but N updates an
    iteration, not one); with s = inf it is ASP.

    Args:
        staleness: s, the greatest lead over the slowest worker, in iterations: an integer >= 0,
            or inf.

    Raises:
        ValueError: Not such a number.

    Example:
        >>> ssp = SSP(1)
        >>> state, decision = ssp.push(ssp.init(2), 0, now=1.0)
        >>> decision
        SyncDecision(aggregate=(0,), release=(0,))
        >>> state, decision = ssp.push(state, 0, now=2.0)  # two ahead: it waits
        >>> decision
        SyncDecision(aggregate=(0,), release=())
        >>> state, decision = ssp.push(state, 1, now=2.5)
        >>> decision
        SyncDecision(aggregate=(1,), release=(0, 1))

    References:
        Ho et al.: More Effective Distributed ML via a Stale Synchronous Parallel Parameter
        Server, NeurIPS 2013.
    """

    staleness: float

    def __post_init__(self) -> None:
        if self.staleness != math.inf:
            require_integer("SSP.staleness", self.staleness, 0)

    def init(self, workers: int, now: float = 0.0) -> SSPState:
        """All released."""
        return SSPState(Clocks.start(workers))

    def push(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Applies the push; releases whom the slowest no longer holds back."""
        clocks = state.clocks
        require_running(worker, clocks.lead(worker) <= self.staleness)
        after = clocks.pushed(worker)
        release = self._freed(clocks.least, after)
        if after.lead(worker) <= self.staleness and worker not in release:
            release = tuple(sorted((*release, worker)))
        return SSPState(after), SyncDecision((worker,), release)

    def finish(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Releases whom only this worker held back."""
        after = state.clocks.left(worker)
        return SSPState(after), SyncDecision(release=self._freed(state.clocks.least, after))

    def join(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """It begins where the slowest is."""
        return SSPState(state.clocks.joined(worker)), SyncDecision(release=(worker,))

    def _freed(self, least: int, after: Clocks) -> tuple[int, ...]:
        """Who waited while the slowest was at `least`, and does not now."""
        if after.least == least:
            return ()
        waited, waits = least + self.staleness, after.least + self.staleness
        return tuple(rank for rank, c in enumerate(after.counts) if waited < c <= waits)
