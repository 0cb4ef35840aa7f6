"""Number of iterations that each worker has pushed, and the slowest worker: for SSP and DSSP."""

from __future__ import annotations

from typing import NamedTuple

from lbbsp_core.sync.base import replaced, require_active, require_inactive
from lbbsp_core.validate import require_integer


class Clocks(NamedTuple):
    """Pushes of each worker, and their minimum.

    Args:
        counts: c by worker, counted from the minimum at its join; ``-1 - c`` for a worker that
            has departed with c.
        min_count: min c over the active workers; it never decreases.
        slowest: Lowest rank with that count; -1 if no worker is active.
    """

    counts: tuple[int, ...]
    min_count: int
    slowest: int

    @classmethod
    def start(cls, workers: int) -> Clocks:
        """Returns clocks at 0 for workers 0 to `workers` - 1."""
        require_integer("workers", workers, 1)
        return cls((0,) * workers, min_count=0, slowest=0)

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
        counts = replaced(self.counts, worker, self.min_count)
        slowest = worker if self.slowest < 0 else min(self.slowest, worker)
        return Clocks(counts, self.min_count, slowest)

    def _with_count(self, worker: int, count: int) -> Clocks:
        after = Clocks(replaced(self.counts, worker, count), self.min_count, self.slowest)
        return after._with_next_slowest() if worker == self.slowest else after

    def _with_next_slowest(self) -> Clocks:
        if self.min_count in self.counts:
            return self._replace(slowest=self.counts.index(self.min_count))
        min_count = min((count for count in self.counts if count >= 0), default=-1)
        if min_count < 0:
            return self._replace(slowest=-1)
        return self._replace(min_count=min_count, slowest=self.counts.index(min_count))
