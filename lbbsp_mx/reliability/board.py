"""Rows that workers post on the parameter servers, for heartbeats."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import mxnet as mx
import numpy as np

from lbbsp_core.runtime.reliability.activity import Activity, describe
from lbbsp_core.runtime.reliability.heartbeat import WIDTH, Beat

_SUSPECT_SECONDS: Final = 2.5  # without a new row, after which a worker may be the cause of a loss
_WORKERS_PER_BEAT: Final = 16.0  # for which rows are posted every second
_SUSPECT_WIDTH: Final = 3


class KeyBoard:
    """Board of heartbeats on keys of a synchronous store, one for each worker.

    The servers answer a push when every worker has pushed the key, whoever pushed it. So a worker
    changes its own key alone by as many pushes as there are workers: its row, and zeros. Rows are
    posted more rarely the more workers there are, because of this number of pushes.

    The rows serve to tell what workers do; whether a process is alive is known from the scheduler
    (`liveness.py`), even while large gradients keep the servers busy. The row of worker 0
    therefore also tells which worker's row has not changed for the longest time. All workers must
    create the board at the same time. Calls of the store are made under `lock`.
    """

    def __init__(
        self,
        native: mx.kv.KVStore,
        keys: Sequence[int],
        lock: AbstractContextManager[object],
    ) -> None:
        self.holder = "a parameter server"
        self._native, self._keys, self._lock = native, list(keys), lock
        self._rank: int = native.rank
        self._busy = threading.Lock()
        self._closed = False
        self._posted: tuple[float, Beat] | None = None
        self._rows: dict[int, tuple[float, list[int]]] = {}
        self._suspect: tuple[int, int, int] | None = None
        self._answered = time.monotonic()
        with lock:
            native.init(self._keys, [mx.nd.zeros(WIDTH + _SUSPECT_WIDTH) for _ in keys])
        # A process must not fork while its engine works for a thread that the child lacks.
        os.register_at_fork(
            before=self._busy.acquire,
            after_in_parent=self._busy.release,
            after_in_child=self._busy.release,
        )

    def post(self, row: Sequence[int]) -> None:
        """Replaces this worker's row, and waits until the servers have it."""
        beat = Beat.of(row)
        with self.using() as usable:
            if usable and self._is_due(beat):
                self._push([*row, *self._suspicion()])
                self._posted = time.monotonic(), beat

    def read(self, rank: int) -> Sequence[int] | None:
        """Returns the row of a worker, or None if it has posted none."""
        with self.using() as usable:
            if not usable:
                return None
            row = self._pull(rank)
        now = self._answered = time.monotonic()
        if not any(row):
            return None
        if rank not in self._rows or self._rows[rank][1] != row:
            self._rows[rank] = now, row
        if self._rank == 0:
            self._suspect = self._find_suspect(now)
        elif rank == 0:
            suspect, activity, step = row[WIDTH:]
            self._suspect = (suspect - 1, activity, step) if suspect else self._find_suspect(now)
        return row[:WIDTH]

    def explain(self) -> str:
        """Returns what the rows tell about the cause when the job ends, or nothing."""
        seconds = time.monotonic() - self._answered
        if seconds > _SUSPECT_SECONDS + self._interval:
            return f"{self.holder} has not responded for {seconds:.0f} s"
        if self._suspect is None:
            return ""
        rank, activity, step = self._suspect
        return f"worker {rank} had not been heard of lately; it was {describe(activity, step)}"

    def close(self, seconds: float = 5.0) -> None:
        """Ends the use of the store, after waiting for a call that is running."""
        if self._busy.acquire(timeout=seconds):
            self._closed = True
            self._busy.release()

    @property
    def _interval(self) -> float:
        """Seconds between two posts."""
        return len(self._keys) / _WORKERS_PER_BEAT

    def _is_due(self, beat: Beat) -> bool:
        if self._posted is None:
            return True
        moment, before = self._posted
        leaves = beat.activity == Activity.LEAVING and before.activity != Activity.LEAVING
        return leaves or beat.loss != before.loss or time.monotonic() - moment >= self._interval

    def _find_suspect(self, now: float) -> tuple[int, int, int] | None:
        """Returns the worker whose row is the oldest, with its activity and step, if it is old."""
        rank = min(self._rows, key=lambda each: self._rows[each][0])
        changed, row = self._rows[rank]
        if now - changed < _SUSPECT_SECONDS + 2 * self._interval:
            return None
        beat = Beat.of(row[:WIDTH])
        return rank, beat.activity, beat.step

    def _suspicion(self) -> list[int]:
        if self._rank or self._suspect is None:
            return [0] * _SUSPECT_WIDTH
        rank, activity, step = self._suspect
        return [rank + 1, activity, step]

    @contextmanager
    def using(self) -> Iterator[bool]:
        """Waits for a call of the store, and lets no other begin; yields whether it is open."""
        with self._busy:
            yield not self._closed

    def _push(self, row: Sequence[int]) -> None:
        key = self._keys[self._rank]
        # Each push needs an array of its own, because MXNet also receives values of the key in it.
        arrays = [mx.nd.zeros(len(row)) for _ in self._keys]
        arrays[0] = mx.nd.array(np.array(row, np.float32))
        with self._lock:
            for array in arrays:
                self._native.push(key, array)
        for array in arrays:
            array.wait_to_read()

    def _pull(self, rank: int) -> list[int]:
        row = mx.nd.zeros(WIDTH + _SUSPECT_WIDTH)
        with self._lock:
            self._native.pull(self._keys[rank], out=row)
        return [int(value) for value in row.asnumpy()]
