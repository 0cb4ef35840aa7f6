"""Number of iterations that each worker has pushed, and the slowest worker: for SSP and DSSP."""

from __future__ import annotations

from typing import NamedTuple

from lbbsp_core.sync.base import require_active, require_inactive
from lbbsp_core.sync.persistent_vector import PersistentVector
from lbbsp_core.validate import require_integer


class Clocks(NamedTuple):
    """Pushes of each worker, and their minimum; a transition takes O(log n), amortised.

    Args:
        counts: c by worker, counted from the minimum at its join; ``-1 - c`` for a worker that
            has departed with c.
        min_count: min c over the active workers; it never decreases.
        slowest: Lowest rank with that count; -1 if no worker is active.
    """

    counts: PersistentVector[int]
    min_count: int
    slowest: int

    @classmethod
    def start(cls, workers: int) -> Clocks:
        """Returns clocks at 0 for workers 0 to `workers` - 1."""
        require_integer("workers", workers, 1)
        return cls(PersistentVector.of((0,) * workers), min_count=0, slowest=0)

    def count(self, worker: int) -> int:
        """Returns the c of an active worker."""
        count = self.counts[worker] if 0 <= worker < len(self.counts) else -1
        require_active(worker, count >= 0, len(self.counts))
        return count

    def lead(self, worker: int) -> int:
        """Returns how many iterations a worker is ahead of the slowest, ``c - min c``."""
        return self.count(worker) - self.min_count

    def after_push(self, worker: int) -> Clocks:
        """Returns the clocks after one more push of `worker`."""
        return self._with_count(worker, self.count(worker) + 1)

    def after_finish(self, worker: int) -> Clocks:
        """Returns the clocks after `worker` has left."""
        return self._with_count(worker, -1 - self.count(worker))

    def after_join(self, worker: int) -> Clocks:
        """Returns the clocks with `worker` at the count of the slowest."""
        known = len(self.counts)
        require_inactive(worker, 0 <= worker < known and self.counts[worker] >= 0, known)
        counts = self.counts.appended(self.min_count) if worker == known else self.counts
        counts = counts.replaced(worker, self.min_count)
        slowest = worker if self.slowest < 0 else min(self.slowest, worker)
        return Clocks(counts, self.min_count, slowest)

    def _with_count(self, worker: int, count: int) -> Clocks:
        after = Clocks(self.counts.replaced(worker, count), self.min_count, self.slowest)
        return after._with_next_slowest() if worker == self.slowest else after

    def _with_next_slowest(self) -> Clocks:
        """Finds the next rank at the same count, or else the first rank at the next count.

        Ranks are scanned once for each value of `min_count`, during which every worker pushes:
        O(1) per push.
        """
        for rank in range(self.slowest + 1, len(self.counts)):
            if self.counts[rank] == self.min_count:
                return self._replace(slowest=rank)
        counts = list(self.counts)
        min_count = min((count for count in counts if count >= 0), default=-1)
        if min_count < 0:
            return self._replace(slowest=-1)
        return self._replace(min_count=min_count, slowest=counts.index(min_count))
