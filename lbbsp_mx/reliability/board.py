"""Rows that workers post on the parameter servers, for heartbeats."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import mxnet as mx

from lbbsp_core.runtime.reliability.activity import Activity, describe
from lbbsp_core.runtime.reliability.heartbeat import WIDTH, Beat
from lbbsp_mx.fence import wait_for

_SUSPECT_SECONDS: Final = 2.5  # without a new row, after which a worker may be the cause of a loss
_WORKERS_PER_BEAT: Final = 16.0  # for which rows are posted every second
_NOBODY: Final = [0, 0, 0]  # in place of a worker's number from 1 on, its activity and its step


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

    holder = "a parameter server"

    def __init__(
        self, native: mx.kv.KVStore, keys: Sequence[int], lock: AbstractContextManager[object]
    ) -> None:
        self._native, self._keys, self._lock = native, list(keys), lock
        self._rank: int = native.rank
        self._busy = threading.Lock()
        self._closed = False
        self._posted, self._posted_at = Beat(), -math.inf
        self._rows: dict[int, tuple[float, list[int]]] = {}
        self._suspect = _NOBODY
        self._answered = time.monotonic()
        with lock:
            native.init(self._keys, [_zeros() for _ in keys])
        # A process must not fork while its engine works for a thread that the child lacks.
        os.register_at_fork(
            before=self._busy.acquire,
            after_in_parent=self._busy.release,
            after_in_child=self._busy.release,
        )

    def post(self, row: Sequence[int]) -> None:
        """Replaces this worker's row, and waits until the servers have it."""
        beat, before = Beat.of(row), self._posted
        leaves = beat.activity == Activity.LEAVING and before.activity != Activity.LEAVING
        with self.using() as usable:
            late = time.monotonic() - self._posted_at >= self._interval
            if usable and (late or leaves or beat.loss != before.loss):
                self._push([*row, *self._suspect])
                self._posted, self._posted_at = beat, time.monotonic()

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
        if self._rank == 0 or rank == 0:
            suspect = row[WIDTH:]  # by worker 0
            self._suspect = suspect if self._rank and any(suspect) else self._find_suspect(now)
        return row[:WIDTH]

    def explain(self) -> str:
        """Returns what the rows tell about the cause when the job ends, or nothing."""
        seconds = time.monotonic() - self._answered
        if seconds > _SUSPECT_SECONDS + self._interval:
            return f"{self.holder} has not responded for {seconds:.0f} s"
        number, *doing = self._suspect
        if not number:
            return ""
        return f"worker {number - 1} had not been heard of lately; it was {describe(*doing)}"

    def close(self, seconds: float = 5.0) -> None:
        """Ends the use of the store, after waiting for a call that is running."""
        if self._busy.acquire(timeout=seconds):
            self._closed = True
            self._busy.release()

    @property
    def _interval(self) -> float:
        """Seconds between two posts."""
        return len(self._keys) / _WORKERS_PER_BEAT

    def _find_suspect(self, now: float) -> list[int]:
        """Returns the worker whose row is the oldest, if it is old."""
        rank, (changed, row) = min(self._rows.items(), key=lambda item: item[1][0])
        if now - changed < _SUSPECT_SECONDS + 2 * self._interval:
            return _NOBODY
        beat = Beat.of(row[:WIDTH])
        return [rank + 1, beat.activity, beat.step]

    @contextmanager
    def using(self) -> Iterator[bool]:
        """Waits for a call of the store, and lets no other begin; yields whether it is open."""
        with self._busy:
            yield not self._closed

    # Functions of their own, so that their arrays are freed, by calls of MXNet, within `using`.

    def _push(self, row: Sequence[int]) -> None:
        # Each push needs an array of its own, because MXNet also receives values of the key in it.
        arrays = [mx.nd.array(row), *(_zeros() for _ in self._keys[1:])]
        with self._lock:
            for array in arrays:
                self._native.push(self._keys[self._rank], array)
        wait_for(arrays)

    def _pull(self, rank: int) -> list[int]:
        row = _zeros()
        with self._lock:
            self._native.pull(self._keys[rank], out=row)
        return [int(value) for value in row.asnumpy()]


def _zeros() -> mx.nd.NDArray:
    return mx.nd.zeros(WIDTH + len(_NOBODY))
