"""Event loop that runs a synchroniser in virtual time: when workers compute, push and wait."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import InitVar, dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lbbsp_core.sim.communication import LinkQueue, ServerLinks
from lbbsp_core.sync.base import SyncDecision, Synchroniser
from lbbsp_core.validate import require_positive

Seconds = Callable[[int, int], float] | npt.ArrayLike
"""Busy seconds by worker and iteration: a function, or an array ``(workers, iterations)``."""

OnUpdate = Callable[[int, float], bool]
"""Called with each worker whose gradient is applied to the model, and the time in seconds.

If it returns True, the run ends: waiting workers are released, and running iterations are lost.
"""


class Iteration(NamedTuple):
    """Iteration of a worker. Times are virtual seconds.

    Args:
        worker: Rank of the worker.
        iteration: Number of the iteration among this worker's, from 0.
        start: Time at which the iteration started, with the request of the model.
        push: Time at which its gradient reached the synchroniser.
        release: Time at which the worker was released to its next iteration; inf if the worker
            had left before.
        version: Number of updates in the model from which the iteration started.
        staleness: Number of updates applied to the model between `start` and `push`.
        update: Number of the update (from 0) that applied its gradient; -1 if none did.
    """

    worker: int
    iteration: int
    start: float
    push: float
    release: float
    version: int
    staleness: int
    update: int


class Change(NamedTuple):
    """Change of membership: a worker leaves, and its running iteration is lost, or joins.

    Args:
        time: Time of the change in virtual seconds; pushes at the same time are handled first.
        worker: Rank of the worker. To join: that of a worker which has left, or the next number.
        joins: Whether the worker joins; else it leaves.
    """

    time: float
    worker: int
    joins: bool = False


class Schedule(NamedTuple):
    """Iterations of a run as columns, ordered by worker, then iteration; see `Iteration`.

    Args:
        worker, iteration, version, staleness, update: Integers, shape ``(pushes,)``.
        start, push, release: Virtual seconds, shape ``(pushes,)``.
    """

    worker: npt.NDArray[np.int64]
    iteration: npt.NDArray[np.int64]
    start: npt.NDArray[np.float64]
    push: npt.NDArray[np.float64]
    release: npt.NDArray[np.float64]
    version: npt.NDArray[np.int64]
    staleness: npt.NDArray[np.int64]
    update: npt.NDArray[np.int64]

    @property
    def updates(self) -> int:
        """Number of updates applied to the model."""
        return int(self.update.max(initial=-1)) + 1

    @property
    def total_seconds(self) -> float:
        """Virtual seconds until the last push."""
        return float(self.push.max(initial=0.0))

    @property
    def waiting_seconds(self) -> float:
        """Sum of all workers' waits; that of a worker which was never released is left out."""
        waits = self.release - self.push
        return float(waits[np.isfinite(waits)].sum())


def schedule(
    synchroniser: Synchroniser,
    seconds: Seconds,
    *,
    workers: int | None = None,
    iterations: int | None = None,
    changes: Iterable[Change] = (),
    on_update: OnUpdate | None = None,
    links: ServerLinks | None = None,
) -> Schedule:
    """Returns the complete schedule of a run in which each worker does `iterations` iterations.

    Args:
        synchroniser: Decides which workers wait for which.
        seconds: Busy seconds of each worker's iterations, each finite and > 0.
        workers: Number of workers at the start. Default: the number of rows of `seconds`.
        iterations: Iterations of each worker. Default: the number of columns of `seconds`.
        changes: Workers that leave and join. An iterator is read as virtual time advances and
            must be ordered by time; any other iterable is sorted.
        on_update: Called after each update; it can end the run, see `OnUpdate`.
        links: Links of parameter servers. A worker that is released pulls the model, computes for
            its busy seconds, and pushes; both transfers queue at the links. The transfer of a
            worker that leaves occupies them to its end. Default: transfers take no time.

    Raises:
        ValueError: Busy seconds are out of range or missing, `workers` or `iterations` is
            missing, or a change is impossible.

    Example:
        >>> from lbbsp_core import BSP
        >>> run = schedule(BSP(), [[1.0, 1.0], [3.0, 2.0]])
        >>> run.total_seconds, run.waiting_seconds, run.updates
        (5.0, 3.0, 2)
    """
    if iterations is None and callable(seconds) and on_update is None:
        raise ValueError("iterations must be given where seconds is a function: the run has no end")
    loop = EventLoop(synchroniser, seconds, workers, iterations, on_update, links)
    rows = sorted(loop.run(changes))
    columns = zip(*rows, strict=True) if rows else ((),) * len(Iteration._fields)
    kinds = [float if name in _TIMES else np.int64 for name in Iteration._fields]
    return Schedule(*(np.array(*column) for column in zip(columns, kinds, strict=True)))


_TIMES = ("start", "push", "release")
_READY, _PUSH, _CHANGE = -1, 0, 1  # of events at the same time, the lower is handled first


@dataclass
class EventLoop:
    """Runs a synchroniser in virtual time; the arguments are those of `schedule`.

    An event costs O(log n) in addition to the synchroniser's own work. Events of the same time
    are handled in the order of ranks. A worker that has done its `iterations` and is released
    leaves, so that no worker waits for it. Iterations of None, where `seconds` is a function, are
    without end.
    """

    synchroniser: Synchroniser
    seconds: Seconds
    workers: int | None = None
    iterations: int | None = None
    on_update: OnUpdate | None = None
    links: InitVar[ServerLinks | None] = None

    def __post_init__(self, links: ServerLinks | None) -> None:
        self._look_up, rows, columns = _as_function(self.seconds)
        workers = rows if self.workers is None else self.workers
        if workers is None:
            raise ValueError("workers must be given where seconds is a function")
        self._limit = columns if self.iterations is None else self.iterations
        self._updates, self._ended = 0, False
        self._state = self.synchroniser.init(workers, 0.0)
        self._heap: list[tuple[float, int, int, Iteration | Change]] = []
        self._pushes = [0] * workers  # iterations pushed, by worker
        self._running: dict[int, Iteration] = {}
        self._waiting: dict[int, Iteration] = {}  # pushed, not released
        self._departed: dict[int, Iteration] = {}  # kept pushes of workers that have left
        self._pull_queue = None if links is None else LinkQueue(links)
        self._push_queue = None if links is None else LinkQueue(links)

    def run(self, changes: Iterable[Change] = ()) -> Iterator[Iteration]:
        """Handles events until none is left, and yields iterations once their worker is released.

        Raises RuntimeError if workers wait, and no worker is left that could push.
        """
        upcoming = enumerate(
            changes if isinstance(changes, Iterator) else sorted(changes, key=attrgetter("time"))
        )
        self._enqueue_change(upcoming)
        yield from self._apply(SyncDecision((), tuple(range(len(self._pushes)))), 0.0)
        while self._heap and not self._ended:
            now, kind, worker, event = heapq.heappop(self._heap)
            if isinstance(event, Change):
                self._enqueue_change(upcoming)
                yield from self._change(event, now)
            elif self._running.get(worker) is not event:
                continue  # its worker left: the push is lost
            elif kind == _READY and self._push_queue is not None:
                arrival = self._push_queue.transfer(now)
                heapq.heappush(self._heap, (arrival, _PUSH, worker, event))
            else:
                yield from self._push(worker, now)
        if self._waiting:
            raise RuntimeError(
                f"workers {', '.join(map(str, sorted(self._waiting)))} wait indefinitely: "
                f"{self.synchroniser!r} released no worker that could push"
            )
        yield from self._departed.values()

    def _enqueue_change(self, upcoming: Iterator[tuple[int, Change]]) -> None:
        """Adds the next membership change, if any, to the events."""
        for number, change in upcoming:
            heapq.heappush(self._heap, (change.time, _CHANGE, number, change))
            return

    def _push(self, worker: int, now: float) -> Iterator[Iteration]:
        iteration = self._running.pop(worker)
        staleness = self._updates - iteration.version
        self._waiting[worker] = iteration._replace(push=now, staleness=staleness)
        self._pushes[worker] += 1
        self._state, decision = self.synchroniser.push(self._state, worker, now)
        yield from self._apply(decision, now)

    def _change(self, change: Change, now: float) -> Iterator[Iteration]:
        worker = change.worker
        if change.joins:
            self._state, decision = self.synchroniser.join(self._state, worker, now)
            self._pushes += [0] * (worker == len(self._pushes))
            if worker in self._departed:
                yield self._departed.pop(worker)
            yield from self._apply(decision, now)
        elif worker in self._running or worker in self._waiting:
            yield from self._apply(self._finish(worker, now), now)

    def _finish(self, worker: int, now: float) -> SyncDecision:
        self._running.pop(worker, None)
        if worker in self._waiting:
            self._departed[worker] = self._waiting.pop(worker)
        self._state, decision = self.synchroniser.finish(self._state, worker, now)
        return decision

    def _apply(self, decision: SyncDecision, now: float) -> Iterator[Iteration]:
        """Updates the model, then releases workers, unless `on_update` ends the run.

        A released worker that has done all its iterations leaves, which may release others.
        """
        decisions = deque([decision])
        while decisions:
            aggregate, release = decisions.popleft()
            for worker in aggregate:
                kept = self._waiting if worker in self._waiting else self._departed
                kept[worker] = kept[worker]._replace(update=self._updates)
            self._updates += bool(aggregate)
            callback = self.on_update
            if callback is not None and any([callback(worker, now) for worker in aggregate]):
                self._ended = True
                waiting, self._waiting = self._waiting, {}
                yield from (iteration._replace(release=now) for iteration in waiting.values())
                return
            for worker in release:
                if worker in self._waiting:
                    yield self._waiting.pop(worker)._replace(release=now)
                if self._pushes[worker] < self._limit:
                    self._start(worker, now)
                else:
                    decisions.append(self._finish(worker, now))

    def _start(self, worker: int, now: float) -> None:
        number = self._pushes[worker]
        busy_seconds = require_positive(
            f"seconds of worker {worker} in iteration {number}", self._look_up(worker, number)
        )
        iteration = Iteration(worker, number, now, math.inf, math.inf, self._updates, 0, -1)
        self._running[worker] = iteration
        pulled = now if self._pull_queue is None else self._pull_queue.transfer(now)
        kind = _PUSH if self._push_queue is None else _READY
        heapq.heappush(self._heap, (pulled + busy_seconds, kind, worker, iteration))


def _as_function(seconds: Seconds) -> tuple[Callable[[int, int], float], int | None, float]:
    """Returns busy seconds as a function, and the numbers of workers and iterations if known."""
    if callable(seconds):
        return seconds, None, math.inf
    table = np.asarray(seconds, dtype=np.float64)
    if table.ndim != 2 or not table.size:
        raise ValueError(
            f"seconds must have shape (workers, iterations), at least one each, got {table.shape}"
        )

    def look_up(worker: int, iteration: int) -> float:
        if worker >= table.shape[0] or iteration >= table.shape[1]:
            raise ValueError(
                f"seconds must reach to worker {worker} and iteration {iteration}, got shape "
                f"{table.shape}: lower workers or iterations, or record more"
            )
        return float(table[worker, iteration])

    return look_up, table.shape[0], table.shape[1]
