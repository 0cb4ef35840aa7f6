"""Number of iterations that each worker has pushed, for SSP and DSSP."""

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
    """

    counts: tuple[int, ...]
    min_count: int

    @classmethod
    def start(cls, workers: int) -> Clocks:
        """Returns clocks at 0 for workers 0 to `workers` - 1."""
        require_integer("workers", workers, 1)
        return cls((0,) * workers, min_count=0)

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
        workers = len(self.counts)
        require_inactive(worker, 0 <= worker < workers and self.counts[worker] >= 0, workers)
        return self._with_count(worker, self.min_count)

    def _with_count(self, worker: int, count: int) -> Clocks:
        counts, least = replaced(self.counts, worker, count), self.min_count
        if least not in counts:  # the slowest worker has pushed or left
            least = min((clock for clock in counts if clock >= 0), default=least)
        return Clocks(counts, least)
