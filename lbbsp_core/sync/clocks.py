"""How many iterations each worker has pushed, and who is the slowest: for SSP and its kin."""

from __future__ import annotations

from typing import NamedTuple

from lbbsp_core.sync.base import require_absent, require_present
from lbbsp_core.sync.persistent_vector import PersistentVector
from lbbsp_core.validate import require_integer


class Clocks(NamedTuple):
    """Pushes of each worker, and their least; a transition takes O(log n), amortised.

    Args:
        counts: c by worker, counted from its join at the then least one; ``-1 - c`` for a worker
            that has left with c.
        least: min c of those who are there; it never falls.
        slowest: The lowest rank with that count; -1 where nobody is there.
    """

    counts: PersistentVector[int]
    least: int
    slowest: int

    @classmethod
    def start(cls, workers: int) -> Clocks:
        """All at 0."""
        require_integer("workers", workers, 1)
        return cls(PersistentVector.of((0,) * workers), least=0, slowest=0)

    def count(self, worker: int) -> int:
        """The c of a worker that is there.

        Raises:
            ValueError: It is not.
        """
        count = self.counts[worker] if 0 <= worker < len(self.counts) else -1
        require_present(worker, count >= 0, len(self.counts))
        return count

    def lead(self, worker: int) -> int:
        """How many iterations a worker is ahead of the slowest: c - min c."""
        return self.count(worker) - self.least

    def pushed(self, worker: int) -> Clocks:
        """One more of `worker`."""
        return self._counted(worker, self.count(worker) + 1)

    def left(self, worker: int) -> Clocks:
        """Without `worker`."""
        return self._counted(worker, -1 - self.count(worker))

    def joined(self, worker: int) -> Clocks:
        """With `worker`, where the slowest is."""
        known = len(self.counts)
        require_absent(worker, 0 <= worker < known and self.counts[worker] >= 0, known)
        counts = self.counts.appended(self.least) if worker == known else self.counts
        counts = counts.replaced(worker, self.least)
        slowest = worker if self.slowest < 0 else min(self.slowest, worker)
        return Clocks(counts, self.least, slowest)

    def _counted(self, worker: int, count: int) -> Clocks:
        after = Clocks(self.counts.replaced(worker, count), self.least, self.slowest)
        return after._next_slowest() if worker == self.slowest else after

    def _next_slowest(self) -> Clocks:
        """The next rank at the same count; else the first one at the next count that is there.

        Ranks are passed once for each value of `least`, in which everybody pushes: O(1) a push.
        """
        for rank in range(self.slowest + 1, len(self.counts)):
            if self.counts[rank] == self.least:
                return self._replace(slowest=rank)
        counts = list(self.counts)
        least = min((count for count in counts if count >= 0), default=-1)
        if least < 0:
            return self._replace(slowest=-1)
        return self._replace(least=least, slowest=counts.index(least))
