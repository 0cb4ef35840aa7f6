"""Runs a synchroniser for real workers that push to a parameter server; no framework inside."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from lbbsp_core.cost import Cost
from lbbsp_core.policy import BatchConstraints, Policy
from lbbsp_core.sync import SyncDecision, Synchroniser
from lbbsp_core.sync.rounds import Rounds


class Pushed(NamedTuple):
    """A push as the run record has it, see `lbbsp_core.RunRecord.push`."""

    worker: int
    iteration: int
    samples: int
    busy_seconds: float
    seconds: float
    staleness: int
    lead: int


class Coordinator:
    """Who draws which samples, whose gradient enters when, and who may go on.

    It stands where all pushes pass, on one parameter server, and answers one call at a time. A
    worker calls, for each iteration::

        begin, end = coordinator.claim(worker, limit)       # its samples, by position
        kept = coordinator.push(worker, ...)                # its gradient is there
        # It adds the gradient to the sum of those that are kept, or to the model.
        if coordinator.entered(worker):                     # ours is the last one of the sum
            ...                                             # updates the model by the sum
            coordinator.applied()
        # It waits until `released` has grown, and reads the model.

    Args:
        synchroniser: Decides who waits for whom.
        cluster: Workers and batches.
        policy: Sizes of the batches, see `lbbsp_core.sync.rounds.Rounds`.
        clock: Seconds of a clock that never goes back.
        logs: Whether somebody reads `log`; it would grow for ever.

    Raises:
        ValueError: A policy that needs common steps.

    Example:
        >>> from lbbsp_core import SSP, BatchConstraints, Even, Limits
        >>> coordinator = Coordinator(SSP(1), BatchConstraints(16, (Limits(),) * 2), Even())
        >>> for _ in range(2):
        ...     samples = coordinator.claim(0, limit=100)
        ...     kept = coordinator.push(0, samples[1] - samples[0], 0.5)
        ...     last = coordinator.entered(0)
        >>> samples, kept, coordinator.released          # worker 0 may not begin a third one
        ((8, 16), False, [2, 1])
    """

    def __init__(
        self,
        synchroniser: Synchroniser,
        constraints: BatchConstraints,
        policy: Policy,
        clock: Callable[[], float] = time.monotonic,
        logs: bool = True,
    ) -> None:
        self.rounds = Rounds(constraints, policy)
        self.synchroniser = synchroniser
        self.released = [1] * constraints.workers
        """Iterations that each worker may have begun."""
        self.present = set(range(constraints.workers))
        self.pushes = 0
        """How many there have been, of all workers."""
        self.updates = 0
        """How often the model has changed: kept pushes enter as one update."""
        self._log: deque[Pushed] = deque(maxlen=None if logs else 0)
        self._clock = clock
        self._began: float | None = None
        self._state: Any = synchroniser.init(constraints.workers)
        self._dealt = 0
        self._iterations = [0] * constraints.workers
        self._counts = [0] * constraints.workers  # pushes since the last barrier
        self._leads = [0] * constraints.workers
        self._alone: dict[int, SyncDecision] = {}  # decided, their gradient is on its way
        self._summed: set[int] = set()
        self._together: SyncDecision | None = None  # decided, some of the sum may be on their way

    def claim(self, worker: int, limit: int) -> tuple[int, int]:
        """The next samples, as many as the worker's batch has, up to position `limit`."""
        self._now()  # time begins with the first iteration
        begin = self._dealt
        self._dealt = max(begin, min(begin + self.rounds.sizes[worker], limit))
        return begin, self._dealt

    def push(
        self,
        worker: int,
        samples: int,
        busy_seconds: float,
        cost: Cost | None = None,
        seen: int = 0,
    ) -> bool:
        """Takes note of a push, and decides.

        Args:
            worker: Whose.
            samples: Its batch.
            busy_seconds: Of its iteration.
            cost: What the worker predicts of its next iteration.
            seen: How many updates there had been when it read the model.

        Returns:
            Whether the gradient is kept, to enter with others: it goes into their sum.
        """
        now = self._now()
        self._state, decision = self.synchroniser.push(self._state, worker, now)
        self._log.append(
            Pushed(
                worker,
                self._iterations[worker],
                samples,
                busy_seconds,
                now,
                self.updates - seen,
                self._leads[worker],
            )
        )
        self.pushes += 1
        self._iterations[worker] += 1
        self._counts[worker] += 1
        self.rounds.ran(worker, samples, busy_seconds, cost)
        if decision.aggregate == (worker,):
            self._alone[worker] = decision
            return False
        self._decided(decision)
        return True

    def entered(self, worker: int) -> bool:
        """The gradient is where it should be: in the model, or, if kept, in the sum.

        Returns:
            Whether the sum is complete: `worker` is to update the model by it.
        """
        if worker in self._alone:
            self.updates += 1
            self._release(self._alone.pop(worker))
            return False
        self._summed.add(worker)
        return self._complete

    def applied(self) -> None:
        """The model has been updated by the sum, which is empty again."""
        decision, self._together = self._together, None
        if decision is None:
            raise ValueError("no sum was to be applied: call this where entered() was true")
        self.updates += 1
        self._summed -= {*decision.aggregate}
        if self.present <= {*decision.release}:  # a barrier: leads are counted from here
            self._counts = [0] * len(self._counts)
        self._release(decision)

    def finish(self, worker: int) -> bool:
        """`worker` has left: nobody waits for it.

        Returns:
            Whether it is to update the model by the sum, now that it holds nobody back.
        """
        if worker not in self.present:
            return False
        self.present.discard(worker)
        self.rounds.remove(worker)
        self._state, decision = self.synchroniser.finish(self._state, worker, self._now())
        self._decided(decision)
        return self._complete

    def log(self, first: int, most: int) -> list[Pushed]:
        """Pushes number `first` and on, at most so many; what came before is forgotten."""
        while self._log and self.pushes - len(self._log) < first:
            self._log.popleft()
        return list(islice(self._log, most))

    @property
    def _complete(self) -> bool:
        return self._together is not None and {*self._together.aggregate} <= self._summed

    def _decided(self, decision: SyncDecision) -> None:
        if decision.aggregate:
            self._together = decision
        else:
            self._release(decision)

    def _release(self, decision: SyncDecision) -> None:
        least = min((self._counts[worker] for worker in self.present), default=0)
        for worker in decision.release:
            self.released[worker] += 1
            self._leads[worker] = self._counts[worker] - least

    def _now(self) -> float:
        """Seconds since the first event."""
        now = self._clock()
        if self._began is None:
            self._began = now
        return now - self._began
