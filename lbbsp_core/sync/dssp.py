"""DSSP: a staleness threshold chosen at run time from a range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lbbsp_core.sync.base import SyncDecision, replaced, require_running, require_time
from lbbsp_core.sync.clocks import Clocks
from lbbsp_core.validate import require_integer


class DSSPWorker(NamedTuple):
    """State of one worker under DSSP.

    Args:
        credits: Iterations that it may still start regardless of its lead.
        waits: Whether it waits for a release.
        pushes: Times of its last two pushes in seconds, the later one last; fewer at the start.
    """

    credits: int = 0
    waits: bool = False
    pushes: tuple[float, ...] = ()


class DSSPState(NamedTuple):
    """State of `DSSP`.

    Args:
        clocks: Iterations that each worker has pushed.
        workers: State of each worker.
    """

    clocks: Clocks
    workers: tuple[DSSPWorker, ...]


@dataclass(frozen=True, slots=True)
class DSSP:
    r"""Dynamic SSP (Zhao et al., arXiv 1908.11848): a lead of ``s_L``, or up to ``s_U`` if it pays.

    Paper: on a push of worker p, if p has credits it spends one and proceeds; else if
    ``c_p - min c <= s_L`` it proceeds; else if p is the fastest, the controller simulates p and
    the slowest worker from their last two pushes, at times ``e_p + r I_p`` and ``e_s + k I_s``,
    and grants the r whose time is nearest to one of the slowest worker's, which minimises the
    wait of p; else p waits until ``c_p - min c <= s_L``.

    Paper: r is in [0, s_U - s_L], so that a worker which has spent its credits can be granted
    more while it is still ahead, and its lead is unbounded. Ours: r is at most s_U minus the
    lead at which p started the iteration it has just pushed, so that p never starts one with a
    lead above s_U. The grant itself spends the first credit: p starts r iterations in all. Of
    several slowest workers we simulate the one of the lowest rank; until both have pushed twice,
    nothing is granted.

    Args:
        lower: s_L, in iterations, an integer >= 0.
        upper: s_U, in iterations, an integer >= s_L.

    Raises:
        ValueError: A bound is not an integer >= 0, or upper < lower.

    Example:
        >>> dssp = DSSP(0, 3)  # worker 0 needs 1 s per iteration, worker 1 needs 4 s
        >>> state, releases = dssp.init(2), []
        >>> for worker, now in (0, 1.0), (1, 4.0), (0, 5.0), (1, 8.0), (0, 9.0), (0, 10.0):
        ...     state, decision = dssp.push(state, worker, now)
        ...     releases.append(decision.release)
        >>> releases  # at 9 s it proceeds: at 12 s both will push
        [(), (0, 1), (), (0, 1), (0,), (0,)]

    References:
        Zhao, An, Liu, Chen: Dynamic Stale Synchronous Parallel Distributed Training for Deep
        Learning, ICDCS 2019, arXiv 1908.11848.
    """

    keeps_pushes: ClassVar[bool] = False

    lower: int
    upper: int

    def __post_init__(self) -> None:
        require_integer("DSSP.lower", self.lower, 0)
        require_integer("DSSP.upper", self.upper, 0)
        if self.upper < self.lower:
            raise ValueError(
                f"DSSP.upper must be >= lower = {self.lower}, got {self.upper}: raise upper, or "
                "lower lower"
            )

    def init(self, workers: int, now: float = 0.0) -> DSSPState:
        """Releases all workers."""
        return DSSPState(Clocks.start(workers), (DSSPWorker(),) * workers)

    def push(self, state: DSSPState, worker: int, now: float) -> tuple[DSSPState, SyncDecision]:
        """Applies the push; releases the worker if it has a credit or a lead of at most s_L."""
        clocks = state.clocks.after_push(worker)
        worker_state = state.workers[worker]
        require_running(worker, not worker_state.waits)
        worker_state = worker_state._replace(pushes=(*worker_state.pushes[-1:], require_time(now)))
        workers = replaced(state.workers, worker, worker_state)
        granted = worker_state.credits or self._grant(DSSPState(clocks, workers), worker)
        waits = not granted and clocks.lead(worker) > self.lower
        worker_state = worker_state._replace(credits=max(granted - 1, 0), waits=waits)
        after, ranks = self._release(state.clocks, clocks, replaced(workers, worker, worker_state))
        release = ranks if waits else tuple(sorted((*ranks, worker)))
        return after, SyncDecision((worker,), release)

    def finish(self, state: DSSPState, worker: int, now: float) -> tuple[DSSPState, SyncDecision]:
        """Removes the worker; releases those that waited for it alone."""
        clocks = state.clocks.after_finish(worker)
        workers = replaced(state.workers, worker, DSSPWorker())
        after, released = self._release(state.clocks, clocks, workers)
        return after, SyncDecision(release=released)

    def join(self, state: DSSPState, worker: int, now: float) -> tuple[DSSPState, SyncDecision]:
        """Adds the worker at the clock of the slowest and releases it."""
        clocks = state.clocks.after_join(worker)
        workers = replaced(state.workers, worker, DSSPWorker())
        return DSSPState(clocks, workers), SyncDecision(release=(worker,))

    def _release(
        self, before: Clocks, clocks: Clocks, workers: tuple[DSSPWorker, ...]
    ) -> tuple[DSSPState, tuple[int, ...]]:
        """Releases the waiting workers whose lead is within s_L since the slowest has moved."""
        released: list[int] = []
        if clocks.min_count != before.min_count:
            for rank, (count, worker) in enumerate(zip(clocks.counts, workers, strict=True)):
                if worker.waits and count - clocks.min_count <= self.lower:
                    released.append(rank)
                    workers = replaced(workers, rank, worker._replace(waits=False))
        return DSSPState(clocks, workers), tuple(released)

    def _grant(self, state: DSSPState, worker: int) -> int:
        """Returns how many iterations the controller lets the fastest worker start, see above."""
        (counts, least), lead = state.clocks, state.clocks.lead(worker)
        if lead <= self.lower or counts[worker] < max(counts):
            return 0
        fast, slow = (state.workers[rank].pushes for rank in (worker, counts.index(least)))
        if len(fast) < 2 or len(slow) < 2 or slow[1] <= slow[0]:
            return 0
        gaps = [
            _gap(fast[1] + r * (fast[1] - fast[0]), slow[1], slow[1] - slow[0])
            for r in range(self.upper - (lead - 1) + 1)
        ]
        return gaps.index(min(gaps))


def _gap(time: float, start: float, interval: float) -> float:
    """Returns the distance from `time` to the nearest ``start + k * interval``, k = 1, 2, ..."""
    elapsed = time - start
    beyond = math.fmod(elapsed, interval)
    return min(beyond, interval - beyond) if elapsed > interval else interval - elapsed
