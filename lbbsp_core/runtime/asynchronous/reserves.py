"""Work sharing under `BSP`: reserves of iterations, dealt out by a coordinator.

See `lbbsp_core.reserve`. The coordinator sees each claim, so that it knows what is left, and alone
chooses how much of the next iteration is shared.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from lbbsp_core.policy import Sizes
from lbbsp_core.reserve import AUTO, Claims, Hindsight, HindsightState, Pace, Seen, Split, split


class PartsReport(NamedTuple):
    """What a worker tells of an iteration, besides its push.

    Args:
        parts: Number of parts that it has claimed.
        seconds: Busy seconds of the iteration, with its claims.
        step_overhead: See `Pace`.
        part_overhead: See `Pace`.
        claim_seconds: Mean seconds of its claims.
        can_share: Whether it draws each batch only when it needs it, and claims are fast.
    """

    parts: int = 0
    seconds: float = 0.0
    step_overhead: float = 0.0
    part_overhead: float = 0.0
    claim_seconds: float = 0.0
    can_share: bool = False


NO_PARTS: Final = PartsReport()


class Reserves:
    """Divides the plan of each iteration into main parts and a reserve, and deals out both.

    Args:
        mode: Fraction of each iteration in percent; `AUTO` chooses it.
        granularity: Main parts and claims are multiples of it, in samples.

    Attributes:
        left: Samples of the running iteration that nobody has claimed.
        has_failed: Whether a worker cannot share.

    Example:
        >>> reserves = Reserves(50, 1)
        >>> for _ in range(2):  # the first iteration has no reserve
        ...     mains = [reserves.main(worker, (8, 8), now=0.0) for worker in (0, 1)]
        ...     _ = [reserves.ran(w, 8, 0.4, PartsReport(can_share=True)) for w in (0, 1)]
        >>> mains, reserves.left
        ([4, 4], 8)
    """

    def __init__(self, mode: int | str, granularity: int) -> None:
        self._mode, self._granularity = mode, granularity
        self._hindsight, self._state = Hindsight(), HindsightState()
        self._sizes: Sizes = ()
        self._split = Split((), 0)
        self._percent, self._began = 0, 0.0
        self._claims: dict[int, Claims] = {}
        self._reports: dict[int, PartsReport] = {}  # last, by rank
        # Of those that have ended the iteration, by rank; None: nothing is learned from it.
        self._ran: dict[int, Pace | None] = {}
        self.left = 0
        self.has_failed = False

    def main(self, worker: int, sizes: Sizes, now: float) -> int:
        """Returns the samples of a worker's main part; its first one begins the next iteration."""
        if not self._sizes or worker in self._ran:
            self._learn()
            self._sizes, self._began = sizes, now
            self._split = split(sizes, self._percent, self._granularity)
            self.left = self._split.reserve
            self._claims, self._ran = {}, {}
        return self._split.mains[worker]

    def claim(self, worker: int, now: float, limit: int) -> int:
        """Returns the samples of a worker's next part, `limit` at most; 0 if nothing is left."""
        if not self.left or limit <= 0:
            return 0
        if worker not in self._claims:
            report = self._reports.get(worker, NO_PARTS)
            self._claims[worker] = Claims(
                *(self._sizes, self._split.mains, worker, self._state.step_seconds or 1.0),
                *(report.claim_seconds, report.part_overhead, self._granularity),
            )
        claims, seconds = self._claims[worker], now - self._began
        claims.take(self._split.reserve - self.left, 0, seconds)  # what all have claimed is known
        size = min(claims.next_size(seconds), self.left, limit)
        claims.take(self._split.reserve - self.left, size, seconds)
        self.left -= size
        return size

    def ran(
        self,
        worker: int,
        samples: int,
        busy_seconds: float,
        shared: PartsReport,
        excluded: bool = False,
    ) -> tuple[int, float]:
        """Takes in an iteration of `worker`; returns its planned batch, and its seconds at once.

        `busy_seconds` are those that `samples` would have taken at once.
        """
        planned = self._sizes[worker] if worker < len(self._sizes) else samples
        pace = busy_seconds / max(shared.step_overhead + samples, 1)
        worker_pace = Pace(pace, shared.step_overhead, shared.part_overhead)
        self._ran[worker] = None if excluded or not busy_seconds or not samples else worker_pace
        self._reports[worker] = shared
        self.has_failed |= not shared.can_share
        return planned, worker_pace.main(planned)

    def _learn(self) -> None:
        """Chooses the fraction of the next iteration by the one that has ended."""
        ran = [worker for worker in sorted(self._ran) if self._sizes[worker]]
        paces = [pace for worker in ran if (pace := self._ran[worker]) is not None]
        if ran and len(paces) == len(ran):
            reports, sizes = [self._reports[w] for w in ran], [self._sizes[w] for w in ran]
            claim = sum(report.claim_seconds for report in reports) / len(reports)
            iteration = Seen(self._percent, max(report.seconds for report in reports))
            self._state = self._hindsight.update(
                self._state, sizes, paces, claim, self._granularity, iteration
            )
        fraction = self._state.percent if self._mode == AUTO else int(self._mode)
        self._percent = 0 if self.has_failed or not ran else fraction

    def forget(self, present: Collection[int]) -> None:
        """Notes which workers are left: those that have departed have no share in means."""
        self._ran = {worker: pace for worker, pace in self._ran.items() if worker in present}
