"""A synchroniser in virtual time: who computes, pushes and waits when."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lbbsp_core.sync.base import SyncDecision, Synchroniser
from lbbsp_core.validate import require_positive

Seconds = Callable[[int, int], float] | npt.ArrayLike
"""Busy seconds of ``(worker, iteration)``: a function, or an array ``(workers, iterations)``."""

Enters = Callable[[int, float], bool]
"""Told of each worker whose gradient enters the model, and when; true ends the run there. Who
then waits is released, and the iterations that run are lost."""


class Iteration(NamedTuple):
    """One iteration of one worker. Times are virtual seconds.

    Args:
        worker: Its rank.
        iteration: Its number among this worker's, from 0.
        start: When it began, from a model that had seen `version` updates.
        push: When its gradient reached the synchroniser.
        release: When the worker could go on; inf if it never could, since it had left.
        version: Updates in the model it began from.
        staleness: Updates by others that entered the model between `start` and `push`.
        update: Number of the update (from 0) by which its gradient entered; -1 if it never did.
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
    """A worker leaves (its running iteration is lost), or comes back or anew.

    Args:
        time: When, in virtual seconds; pushes of that very time come first.
        worker: Its rank; to join, a former one or the next number.
        joins: Whether it joins.
    """

    time: float
    worker: int
    joins: bool = False


class Schedule(NamedTuple):
    """All iterations as columns, ordered by worker, then iteration: see `Iteration`.

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
        """How many updates entered the model."""
        return int(self.update.max(initial=-1)) + 1

    @property
    def total_seconds(self) -> float:
        """Time of the last push."""
        return float(self.push.max(initial=0.0))

    @property
    def waiting_seconds(self) -> float:
        """Of all workers together, but for the wait of one that never went on."""
        waits = self.release - self.push
        return float(waits[np.isfinite(waits)].sum())


def schedule(
    synchroniser: Synchroniser,
    seconds: Seconds,
    *,
    workers: int | None = None,
    iterations: int | None = None,
    changes: Iterable[Change] = (),
    on_update: Enters | None = None,
) -> Schedule:
    """The whole schedule of a run in which each worker does `iterations` iterations.

    Args:
        synchroniser: Who decides.
        seconds: Busy seconds of each worker's iterations, each finite and > 0.
        workers: At the start; where `seconds` is an array, as many as it has rows.
        iterations: Of each worker; where `seconds` is an array, as many as it has columns.
        changes: Who leaves and joins, and when. An iterator is read as time goes on, and must be
            in its order; anything else is sorted.
        on_update: May end the run, see `Enters`.

    Raises:
        ValueError: Seconds out of range or not given, or a change that cannot be.

    Example:
        >>> from lbbsp_core import BSP
        >>> run = schedule(BSP(), [[1.0, 1.0], [3.0, 2.0]])
        >>> run.total_seconds, run.waiting_seconds, run.updates
        (5.0, 3.0, 2)
    """
    if iterations is None and callable(seconds) and on_update is None:
        raise ValueError("iterations must be given where seconds is a function: the run has no end")
    rows = sorted(
        play(
            synchroniser,
            seconds,
            workers=workers,
            iterations=iterations,
            changes=changes,
            on_update=on_update,
        )
    )
    columns = zip(*rows, strict=True) if rows else ((),) * len(Iteration._fields)
    kinds = [float if name in _TIMES else np.int64 for name in Iteration._fields]
    return Schedule(*(np.array(*column) for column in zip(columns, kinds, strict=True)))


def play(
    synchroniser: Synchroniser,
    seconds: Seconds,
    *,
    workers: int | None = None,
    iterations: int | None = None,
    changes: Iterable[Change] = (),
    on_update: Enters | None = None,
) -> Iterator[Iteration]:
    """Runs `synchroniser` in virtual time, O(log n) an event beside its own work.

    Events of the same time come in the order of ranks. A worker that has done its `iterations`
    and is released leaves, so that nobody waits for it.

    Args:
        synchroniser: Who decides.
        seconds: As in `schedule`.
        workers: As in `schedule`.
        iterations: Of each worker; None: they go on for as long as the iterator is read.
        changes: As in `schedule`.
        on_update: As in `schedule`.

    Yields:
        Each iteration, once its worker is released.

    Raises:
        ValueError: As in `schedule`.
        RuntimeError: Somebody waits, and nobody is left who could push.
    """
    look_up, rows, columns = _reading(seconds)
    workers = rows if workers is None else workers
    if workers is None:
        raise ValueError("workers must be given where seconds is a function")
    limit = columns if iterations is None else iterations
    return _Run(synchroniser, look_up, workers, limit, on_update).run(changes)


_TIMES = ("start", "push", "release")
_PUSH, _CHANGE = 0, 1


class _Run:
    """The events of one run, and what they lead to."""

    def __init__(
        self,
        synchroniser: Synchroniser,
        seconds: Callable[[int, int], float],
        workers: int,
        iterations: int | None,
        on_update: Enters | None = None,
    ) -> None:
        self._synchroniser = synchroniser
        self._state = synchroniser.init(workers, 0.0)
        self._seconds = seconds
        self._limit = math.inf if iterations is None else iterations
        self._heap: list[tuple[float, int, int, Any]] = []
        self._done = [0] * workers  # iterations pushed
        self._running: dict[int, Iteration] = {}
        self._waiting: dict[int, Iteration] = {}  # pushed, not released
        self._left: dict[int, Iteration] = {}  # pushed, kept, and gone
        self._updates = 0
        self._enters = on_update
        self._over = False

    def run(self, changes: Iterable[Change]) -> Iterator[Iteration]:
        ahead = enumerate(
            changes if isinstance(changes, Iterator) else sorted(changes, key=attrgetter("time"))
        )
        self._expect(ahead)
        yield from self._obey(SyncDecision((), tuple(range(len(self._done)))), 0.0)
        while self._heap and not self._over:
            now, kind, worker, what = heapq.heappop(self._heap)
            if kind == _CHANGE:
                self._expect(ahead)
                yield from self._change(what, now)
            elif self._running.get(worker) is what:  # else it left, and this is lost
                yield from self._push(worker, now)
        if self._waiting:
            raise RuntimeError(
                f"workers {', '.join(map(str, sorted(self._waiting)))} wait for ever: "
                f"{self._synchroniser!r} released nobody who could push"
            )
        yield from self._left.values()

    def _expect(self, ahead: Iterator[tuple[int, Change]]) -> None:
        """Puts the next change, if there is one, among the events."""
        for number, change in ahead:
            heapq.heappush(self._heap, (change.time, _CHANGE, number, change))
            return

    def _push(self, worker: int, now: float) -> Iterator[Iteration]:
        begun = self._running.pop(worker)
        stale = self._updates - begun.version
        self._waiting[worker] = begun._replace(push=now, staleness=stale)
        self._done[worker] += 1
        self._state, decision = self._synchroniser.push(self._state, worker, now)
        yield from self._obey(decision, now)

    def _change(self, change: Change, now: float) -> Iterator[Iteration]:
        worker = change.worker
        if change.joins:
            self._state, decision = self._synchroniser.join(self._state, worker, now)
            self._done += [0] * (worker == len(self._done))
            if worker in self._left:
                yield self._left.pop(worker)
            yield from self._obey(decision, now)
        elif worker in self._running or worker in self._waiting:
            yield from self._obey(self._finish(worker, now), now)

    def _finish(self, worker: int, now: float) -> SyncDecision:
        self._running.pop(worker, None)
        if worker in self._waiting:
            self._left[worker] = self._waiting.pop(worker)
        self._state, decision = self._synchroniser.finish(self._state, worker, now)
        return decision

    def _obey(self, decision: SyncDecision, now: float) -> Iterator[Iteration]:
        """Updates the model, then releases; who is done leaves, which may release others."""
        decisions = deque([decision])
        while decisions:
            aggregate, release = decisions.popleft()
            for worker in aggregate:
                kept = self._waiting if worker in self._waiting else self._left
                kept[worker] = kept[worker]._replace(update=self._updates)
            self._updates += bool(aggregate)
            if self._enters is not None and any([self._enters(one, now) for one in aggregate]):
                yield from self._end(now)
                return
            for worker in release:
                if worker in self._waiting:
                    yield self._waiting.pop(worker)._replace(release=now)
                if self._done[worker] < self._limit:
                    self._begin(worker, now)
                else:
                    decisions.append(self._finish(worker, now))

    def _end(self, now: float) -> Iterator[Iteration]:
        """Releases who waits, and no more."""
        self._over = True
        for waiting in self._waiting.values():
            yield waiting._replace(release=now)
        self._waiting.clear()

    def _begin(self, worker: int, now: float) -> None:
        number = self._done[worker]
        took = require_positive(
            f"seconds of worker {worker} in iteration {number}", self._seconds(worker, number)
        )
        begun = Iteration(worker, number, now, math.inf, math.inf, self._updates, 0, -1)
        self._running[worker] = begun
        heapq.heappush(self._heap, (now + took, _PUSH, worker, begun))


def _reading(seconds: Any) -> tuple[Callable[[int, int], float], int | None, int | None]:
    """Seconds as a function, and how many workers and iterations there are, if that is known."""
    if callable(seconds):
        return seconds, None, None
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
