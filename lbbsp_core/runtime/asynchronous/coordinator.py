"""Coordinator of real workers that push to a parameter server; uses no framework."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lbbsp_core.cost import Cost
from lbbsp_core.policy import BatchConstraints, Policy
from lbbsp_core.runtime.record.record import PushLine
from lbbsp_core.sync import SyncDecision, Synchroniser
from lbbsp_core.sync.rounds import Rounds


@dataclass(eq=False)
class Coordinator:
    """Assigns samples to workers, orders their updates, and releases them by a synchroniser.

    All pushes pass through one coordinator, on one parameter server, which answers one call at a
    time. For each iteration a worker calls::

        begin, end = coordinator.claim(worker, limit)       # positions of its samples
        kept = coordinator.push(worker, ...)                # its gradient has been computed
        # Adds the gradient to the sum if it is kept, and to the model otherwise.
        if coordinator.entered(worker):                     # the sum is complete
            ...                                             # updates the model by the sum
            coordinator.applied()
        # Waits until `released` has grown, and reads the model.

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

    def __post_init__(self) -> None:
        workers = self.constraints.workers
        self.rounds = Rounds(self.constraints, self.policy, self.is_known)
        self.released = [1] * workers
        """Number of iterations that each worker may have started."""
        self.present = set(range(workers))
        """Ranks of the workers that have not finished."""
        self.pushes = 0
        """Number of pushes so far, by all workers."""
        self.updates = 0
        """Number of updates of the model; all pushes of a sum enter as one update."""
        self._log: deque[PushLine] = deque(maxlen=None if self.logs else 0)
        self._start: float | None = None
        self._state: Any = self.synchroniser.init(workers)
        self._claimed = 0
        self._iterations = [0] * workers
        self._counts = [0] * workers  # pushes since the last barrier
        self._leads = [0] * workers
        self._alone: dict[int, SyncDecision] = {}  # decided, but not entered yet
        self._summed: set[int] = set()
        self._together: SyncDecision | None = None  # decided, the sum may be incomplete

    def claim(self, worker: int, limit: int) -> tuple[int, int]:
        """Assigns samples before `limit` to a worker: positions of the first and after the last."""
        self._now()  # time starts with the first iteration
        begin = self._claimed
        self._claimed = max(begin, min(begin + self.rounds.sizes[worker], limit))
        return begin, self._claimed

    def push(
        self,
        worker: int,
        samples: int,
        busy_seconds: float,
        cost: Cost | None = None,
        seen: int = 0,
        excluded: bool = False,
    ) -> bool:
        """Registers a push, and decides when its gradient enters the model.

        Returns whether the gradient is kept, to enter as a part of a sum. `seen` is the value of
        `updates` when the worker read the model; `excluded` is for other reasons than a first use
        of a batch size.
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
            )
        )
        self.pushes += 1
        self._iterations[worker] += 1
        self._counts[worker] += 1
        self.rounds.ran(worker, samples, busy_seconds, cost, excluded)
        if decision.aggregate == (worker,):
            self._alone[worker] = decision
            return False
        self._handle(decision)
        return True

    def entered(self, worker: int) -> bool:
        """Registers that a gradient has been added to the model or, if kept, to the sum.

        Returns whether a sum is complete, so that `worker` must update the model by it.
        """
        if worker in self._alone:
            self.updates += 1
            self._release(self._alone.pop(worker))
            return False
        self._summed.add(worker)
        return self._complete

    def applied(self) -> None:
        """Registers that the model has been updated by the sum, which is empty again."""
        decision, self._together = self._together, None
        if decision is None:
            raise ValueError(
                "no sum was to be applied: call applied() only after entered() returned True"
            )
        self.updates += 1
        self._summed -= {*decision.aggregate}
        if self.present <= {*decision.release}:  # a barrier: leads are counted from it
            self._counts = [0] * len(self._counts)
        self._release(decision)

    def finish(self, worker: int) -> bool:
        """Registers that a worker has finished, so that no worker waits for it.

        Returns whether the sum is complete now, so that `worker` must update the model by it.
        """
        if worker not in self.present:
            return False
        self.present.discard(worker)
        self.rounds.remove(worker)
        self._state, decision = self.synchroniser.finish(self._state, worker, self._now())
        self._handle(decision)
        return self._complete

    def log(self, first: int, max_lines: int) -> list[PushLine]:
        """Returns pushes in order, and discards those before the first one."""
        while self._log and self.pushes - len(self._log) < first:
            self._log.popleft()
        return list(islice(self._log, max_lines))

    @property
    def _complete(self) -> bool:
        return self._together is not None and {*self._together.aggregate} <= self._summed

    def _handle(self, decision: SyncDecision) -> None:
        if decision.aggregate:
            self._together = decision
        else:
            self._release(decision)

    def _release(self, decision: SyncDecision) -> None:
        slowest = min((self._counts[worker] for worker in self.present), default=0)
        for worker in decision.release:
            self.released[worker] += 1
            self._leads[worker] = self._counts[worker] - slowest

    def _now(self) -> float:
        """Returns the seconds since the first call."""
        now = self.clock()
        if self._start is None:
            self._start = now
        return now - self._start
