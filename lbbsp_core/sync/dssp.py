"""DSSP: a staleness that moves within a range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lbbsp_core.sync.base import SyncDecision, require_running, require_time
from lbbsp_core.sync.clocks import Clocks
from lbbsp_core.sync.persistent_vector import PersistentVector
from lbbsp_core.validate import require_integer


class DSSPWorker(NamedTuple):
    """What DSSP knows of one worker.

    Args:
        credits: Iterations that it may still begin without being asked how far ahead it is.
        waits: Whether it waits for a release.
        pushes: Times of its last two pushes, the later one last; fewer at the start.
    """

    credits: int = 0
    waits: bool = False
    pushes: tuple[float, ...] = ()


class DSSPState(NamedTuple):
    """How far everybody is, and how fast; `most` is the greatest count of those who are there."""

    clocks: Clocks
    paces: PersistentVector[DSSPWorker]
    most: int


@dataclass(frozen=True, slots=True)
class DSSP:
    r"""Dynamic SSP (Zhao et al., arXiv 1908.11848): a lead of ``s_L``, or up to ``s_U`` if it pays.

    Paper: on a push of worker p, if p holds credits it spends one and goes on; else if
    ``c_p - min c <= s_L`` it goes on; else if p is the fastest, the controller simulates p and
    the slowest worker from their last two pushes, at times ``e_p + r I_p`` and ``e_s + k I_s``,
    and grants the r whose time is nearest to one of the slowest's, so that p then waits
    least; else p waits until ``c_p - min c <= s_L``.

    Paper: r is in [0, s_U - s_L], so that a worker which has spent its credits can be granted
    more while it is still ahead, and its lead has no bound. Ours: r is at most s_U minus the
    lead at which p began the iteration it has just pushed, so that p never begins one with a
    lead above s_U. The grant itself spends the first credit: p begins r iterations in all. Of
    several slowest workers we simulate that of the lowest rank; until p and it have pushed
    twice, nothing is granted.

    Args:
        lower: s_L, in iterations, an integer >= 0.
        upper: s_U, in iterations, an integer >= s_L.

    Raises:
        ValueError: Not such numbers.

    Example:
        >>> dssp = DSSP(0, 3)  # worker 0 needs 1 s an iteration, worker 1 needs 4 s
        >>> state, releases = dssp.init(2), []
        >>> for worker, now in (0, 1.0), (1, 4.0), (0, 5.0), (1, 8.0), (0, 9.0), (0, 10.0):
        ...     state, decision = dssp.push(state, worker, now)
        ...     releases.append(decision.release)
        >>> releases  # at 9 s it may go on, since it could be at 12 s when worker 1 is
        [(), (0, 1), (), (0, 1), (0,), (0,)]
    """

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
        """All released."""
        return DSSPState(Clocks.start(workers), PersistentVector.of((DSSPWorker(),) * workers), 0)

    def push(self, state: DSSPState, worker: int, now: float) -> tuple[DSSPState, SyncDecision]:
        """Applies the push; releases the worker for a credit, old or new, or for a small lead."""
        clocks = state.clocks.pushed(worker)
        pace = state.paces[worker]
        require_running(worker, not pace.waits)
        pace = pace._replace(pushes=(*pace.pushes[-1:], require_time(now)))
        most = max(state.most, clocks.count(worker))
        known = DSSPState(clocks, state.paces.replaced(worker, pace), most)
        granted = pace.credits or self._grant(known, worker)
        waits = not granted and clocks.lead(worker) > self.lower
        pace = pace._replace(credits=max(granted - 1, 0), waits=waits)
        known = known._replace(paces=known.paces.replaced(worker, pace))
        after, freed = self._free(state.clocks, known)
        release = freed if waits else tuple(sorted((*freed, worker)))
        return after, SyncDecision((worker,), release)

    def finish(self, state: DSSPState, worker: int, now: float) -> tuple[DSSPState, SyncDecision]:
        """Releases whom only this worker held back."""
        clocks = state.clocks.left(worker)
        paces = state.paces.replaced(worker, DSSPWorker())
        most = state.most
        if state.clocks.count(worker) == most:
            most = max(clocks.least, *clocks.counts)
        after, freed = self._free(state.clocks, DSSPState(clocks, paces, most))
        return after, SyncDecision(release=freed)

    def join(self, state: DSSPState, worker: int, now: float) -> tuple[DSSPState, SyncDecision]:
        """It begins where the slowest is."""
        clocks = state.clocks.joined(worker)
        new = worker == len(state.paces)
        paces = state.paces.appended(DSSPWorker()) if new else state.paces
        return DSSPState(clocks, paces, state.most), SyncDecision(release=(worker,))

    def _free(self, before: Clocks, after: DSSPState) -> tuple[DSSPState, tuple[int, ...]]:
        """Releases who waits and need not, now that the slowest has moved."""
        clocks, paces, most = after
        if clocks.least == before.least:
            return after, ()
        far = clocks.least + self.lower
        freed = tuple(
            rank
            for rank, (count, pace) in enumerate(zip(clocks.counts, paces, strict=True))
            if pace.waits and count <= far
        )
        for rank in freed:
            paces = paces.replaced(rank, paces[rank]._replace(waits=False))
        return DSSPState(clocks, paces, most), freed

    def _grant(self, state: DSSPState, worker: int) -> int:
        """The controller: how many iterations the fastest worker may begin, ahead as it is."""
        clocks, paces, most = state
        lead = clocks.lead(worker)
        if lead <= self.lower or clocks.count(worker) < most:
            return 0
        fast, slow = paces[worker].pushes, paces[clocks.slowest].pushes
        if len(fast) < 2 or len(slow) < 2 or slow[1] <= slow[0]:
            return 0
        gaps = [
            _gap(fast[1] + r * (fast[1] - fast[0]), slow[1], slow[1] - slow[0])
            for r in range(self.upper - (lead - 1) + 1)
        ]
        return gaps.index(min(gaps))


def _gap(time: float, begin: float, interval: float) -> float:
    """From `time` to the nearest of ``begin + k * interval``, k = 1, 2, ..."""
    since = time - begin
    beyond = math.fmod(since, interval)
    return min(beyond, interval - beyond) if since > interval else interval - since
