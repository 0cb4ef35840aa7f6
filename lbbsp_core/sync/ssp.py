"""SSP: no worker gets more than s iterations ahead of the slowest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lbbsp_core.sync.base import SyncDecision, require_running
from lbbsp_core.sync.clocks import Clocks
from lbbsp_core.validate import require_integer


class SSPState(NamedTuple):
    """State of `SSP`.

    Args:
        clocks: Iterations that each worker has pushed.
    """

    clocks: Clocks


@dataclass(frozen=True, slots=True)
class SSP:
    r"""Stale synchronous parallel: worker p may start clock ``c_p`` iff ``c_p - min c <= s``.

    c_p is the number of iterations that worker p has pushed (Ho et al., NeurIPS 2013, Section 2).
    Each push enters the model on arrival. With s = 0 all workers wait for the slowest, at BSP's
    times (but with N updates per iteration, not one); with s = inf it is ASP.

    Args:
        staleness: s, maximum lead over the slowest worker, in iterations: an integer >= 0, or
            inf.

    Raises:
        ValueError: `staleness` is neither an integer >= 0 nor inf.

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

    keeps_pushes: ClassVar[bool] = False

    staleness: float

    def __post_init__(self) -> None:
        if self.staleness != math.inf:
            require_integer("SSP.staleness", self.staleness, 0)

    def init(self, workers: int, now: float = 0.0) -> SSPState:
        """Releases all workers."""
        return SSPState(Clocks.start(workers))

    def push(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Applies the push; releases the workers whose lead is now within s."""
        clocks = state.clocks
        require_running(worker, clocks.lead(worker) <= self.staleness)
        after = clocks.after_push(worker)
        release = self._released(clocks.min_count, after)
        if after.lead(worker) <= self.staleness and worker not in release:
            release = tuple(sorted((*release, worker)))
        return SSPState(after), SyncDecision((worker,), release)

    def finish(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Removes the worker; releases those that waited for it alone."""
        after = state.clocks.after_finish(worker)
        return SSPState(after), SyncDecision(release=self._released(state.clocks.min_count, after))

    def join(self, state: SSPState, worker: int, now: float) -> tuple[SSPState, SyncDecision]:
        """Adds the worker at the clock of the slowest and releases it."""
        return SSPState(state.clocks.after_join(worker)), SyncDecision(release=(worker,))

    def _released(self, min_before: int, after: Clocks) -> tuple[int, ...]:
        """Returns the workers that waited while the slowest was at `min_before` and may now run."""
        if after.min_count == min_before:
            return ()
        before, now = min_before + self.staleness, after.min_count + self.staleness
        return tuple(rank for rank, c in enumerate(after.counts) if before < c <= now)
