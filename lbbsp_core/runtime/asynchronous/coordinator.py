"""Coordinator of asynchronous training: who gets which samples, and when pushes enter the model.

It is a state machine on the server where the questions of workers arrive (`coordination.py`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lbbsp_core.cost import Cost
from lbbsp_core.policy import BatchConstraints, Policy
from lbbsp_core.runtime.asynchronous.reserves import NO_PARTS, PartsReport, Reserves
from lbbsp_core.runtime.record.record import PushLine
from lbbsp_core.sync.base import SyncDecision, Synchroniser, ends_together
from lbbsp_core.sync.rounds import Rounds

logger = logging.getLogger("lbbsp.session")


@dataclass(eq=False)
class Coordinator:
    """Assigns samples to workers, orders their updates, and releases them by a synchroniser.

    All pushes pass through one coordinator, on one parameter server, which answers one call at a
    time. For each iteration a worker calls::

        begin, end = coordinator.claim(worker, limit)       # positions of its samples
        kept = coordinator.push(worker, ...)                # its gradient has been computed
        # Adds the gradient to the sum if it is kept, and to the model otherwise.
        if coordinator.entered(worker) is not None:         # the sum is complete
            ...                                             # updates the model by the sum
            coordinator.applied()
        # Waits until `released` has grown, and reads the model.

    Under `BSP`, `reserves` may divide iterations: then `claim` returns the main part, after which
    `claim_part` is called until nothing is left, and the push is of all parts together. A worker
    for which nothing is left before the limit takes part in the iteration, with no samples, if it
    is awaited.

    If `logs`, pushes are kept until `log` is called. `is_known` is that of `Rounds`.

    Example:
        >>> from lbbsp_core import SSP, BatchConstraints, Even, Limits
        >>> coordinator = Coordinator(SSP(1), BatchConstraints(16, (Limits(),) * 2), Even())
        >>> for _ in range(2):
        ...     samples = coordinator.claim(0, limit=100)
        ...     kept = coordinator.push(0, samples[1] - samples[0], 0.5)
        ...     last = coordinator.entered(0)
        >>> samples, kept, coordinator.released          # worker 0 may not start a third one
        ((8, 16), False, [2, 1])
    """

    synchroniser: Synchroniser
    constraints: BatchConstraints
    policy: Policy
    clock: Callable[[], float] = time.monotonic
    logs: bool = True
    is_known: Sequence[bool] | None = None
    reserves: Reserves | None = None

    def __post_init__(self) -> None:
        workers = self.constraints.workers
        self.rounds = Rounds(self.constraints, self.policy, self.is_known)
        self.released = [1] * workers
        """Number of iterations that each worker may have started."""
        self.pushes = 0
        """Number of pushes so far, by all workers."""
        self.updates = 0
        """Number of updates of the model; all pushes of a sum enter as one update."""
        self._log: deque[PushLine] = deque(maxlen=None if self.logs else 0)
        self._start: float | None = None
        self._state: Any = self.synchroniser.init(workers)
        self._claimed = 0
        # First positions that each worker has claimed, by its iterations from the last pushed one.
        self._claims: list[dict[int, int]] = [{} for _ in range(workers)]
        self._iterations = [0] * workers
        self._counts = [0] * workers  # pushes since the last barrier
        self._leads = [0] * workers
        self._alone: dict[int, SyncDecision] = {}  # decided, but not entered yet
        self._summed: set[int] = set()
        self._samples = [0] * workers  # of the last push of each worker
        self._together: SyncDecision | None = None  # decided, the sum may be incomplete

    def claim(self, worker: int, limit: int, iteration: int = 0, first: int = 0) -> tuple[int, int]:
        """Assigns samples before `limit` to a worker: positions of the first and after the last.

        `iteration` is the number of its iteration in which it uses them; see `is_awaited`. Samples
        before position `first` that nobody has claimed are dropped.
        """
        self._claimed = max(self._claimed, first)
        now, sizes = self._now(), self.rounds.sizes  # time starts with the first iteration
        size = self.reserves.main(worker, sizes, now) if self.reserves else sizes[worker]
        begin, end = self._assign(size, limit)
        if end > begin:
            self._claims[worker][iteration] = begin
        return begin, end

    def is_awaited(self, worker: int, iteration: int, limit: int) -> bool:
        """Returns whether others have claimed samples before `limit` for an iteration."""
        claims_of_others = (self._claims[other] for other in self.rounds.active - {worker})
        return any(claims.get(iteration, limit) < limit for claims in claims_of_others)

    def claim_part(self, worker: int, limit: int) -> tuple[int, int]:
        """Assigns samples of the reserve before `limit`; equal positions if nothing is left."""
        left = limit - self._claimed
        size = self.reserves.claim(worker, self._now(), left) if self.reserves else 0
        return self._assign(size, limit)

    @property
    def has_reserve(self) -> bool:
        """Whether samples of the running iteration are left to be claimed."""
        return self.reserves is not None and self.reserves.left > 0

    def _assign(self, size: int, limit: int) -> tuple[int, int]:
        begin = self._claimed
        self._claimed = max(begin, min(begin + size, limit))
        return begin, self._claimed

    def push(
        self,
        worker: int,
        samples: int,
        busy_seconds: float,
        cost: Cost | None = None,
        seen: int = 0,
        excluded: bool = False,
        shared: PartsReport = NO_PARTS,
    ) -> bool:
        """Registers a push, and decides when its gradient enters the model.

        Returns whether the gradient is kept, to enter as a part of a sum. `seen` is the value of
        `updates` when the worker read the model; `excluded` is for other reasons than a first use
        of a batch size. If it has claimed parts, `samples` are those of all parts, and
        `busy_seconds` those that they would have taken at once.
        """
        now = self._now()
        self._state, decision = self.synchroniser.push(self._state, worker, now)
        self._log.append(
            PushLine(
                push=self.pushes,
                worker=worker,
                iteration=self._iterations[worker],
                samples=samples,
                busy_seconds=busy_seconds,
                seconds=now,
                staleness=self.updates - seen,
                lead=self._leads[worker],
                parts=shared.parts,
            )
        )
        self._samples[worker] = samples
        last, claims = self._iterations[worker], self._claims[worker]
        self._claims[worker] = {k: begin for k, begin in claims.items() if k >= last}
        if self.reserves:
            samples, busy_seconds = self.reserves.ran(
                worker, samples, busy_seconds, shared, excluded
            )
        self.pushes += 1
        self._iterations[worker] += 1
        self._counts[worker] += 1
        notices, start = self.rounds.notices, len(self.rounds.notices)
        self.rounds.ran(worker, samples, busy_seconds, cost, excluded)
        for text in notices[start:]:
            logger.log(notices.level, "%s", text)
        if decision.aggregate == (worker,) and not ends_together(self.synchroniser):
            self._alone[worker] = decision
            return False
        self._handle(decision)
        return True

    def entered(self, worker: int) -> int | None:
        """Registers that a gradient has been added to the model or, if kept, to the sum.

        Returns the samples of the sum if it is complete, so that `worker` must update the model by
        it; else None.
        """
        if worker in self._alone:
            self.updates += 1
            self._release(self._alone.pop(worker))
            return None
        self._summed.add(worker)
        return self._complete()

    def applied(self) -> None:
        """Registers that the model has been updated by the sum, which is empty again."""
        decision, self._together = self._together, None
        if decision is None:
            raise ValueError(
                "no sum was to be applied: call applied() only after entered() has returned samples"
            )
        self.updates += 1
        self._summed -= {*decision.aggregate}
        if self.rounds.active <= {*decision.release}:  # a barrier: leads are counted from it
            self._counts = [0] * len(self._counts)
        self._release(decision)

    def finish(self, worker: int) -> int | None:
        """Registers that a worker has finished, so that no worker waits for it.

        Returns what `entered` does: the sum may be complete now.
        """
        if worker not in self.rounds.active:
            return None
        self.rounds.remove(worker)
        if self.reserves:
            self.reserves.forget(self.rounds.active)
        self._state, decision = self.synchroniser.finish(self._state, worker, self._now())
        self._handle(decision)
        return self._complete()

    def log(self, first: int, max_lines: int) -> list[PushLine]:
        """Returns pushes in order, and discards those before the first one."""
        while self._log and self.pushes - len(self._log) < first:
            self._log.popleft()
        return list(islice(self._log, max_lines))

    def _complete(self) -> int | None:
        if self._together is None or not {*self._together.aggregate} <= self._summed:
            return None
        return sum(self._samples[worker] for worker in self._together.aggregate)

    def _handle(self, decision: SyncDecision) -> None:
        if decision.aggregate:
            self._together = decision
        else:
            self._release(decision)

    def _release(self, decision: SyncDecision) -> None:
        slowest = min((self._counts[worker] for worker in self.rounds.active), default=0)
        for worker in decision.release:
            self.released[worker] += 1
            self._leads[worker] = self._counts[worker] - slowest

    def _now(self) -> float:
        """Returns the seconds since the first call."""
        now = self.clock()
        if self._start is None:
            self._start = now
        return now - self._start
