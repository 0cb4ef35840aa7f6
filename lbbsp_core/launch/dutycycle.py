"""Slowness where there are no quotas: stop and continue each worker on a short cycle."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

CYCLE_SECONDS: Final = 0.02
SHORTEST_PAUSE: Final = (
    0.01  # cycles: an edge that rounding puts just ahead costs no more than this
)


class Window(NamedTuple):
    """The part of the cycle in which a worker runs: from ``start`` on, for ``share`` of it."""

    start: float
    share: float

    def contains(self, phase: float) -> bool:
        """Whether the worker runs at this phase of the cycle, in [0, 1)."""
        return (phase - self.start) % 1.0 < self.share

    def next_edge(self, phase: float) -> float:
        """How much of a cycle passes until the worker is stopped or continued."""
        since = (phase - self.start) % 1.0
        return (self.share if since < self.share else 1.0) - since


def windows(shares: Sequence[float]) -> tuple[Window, ...]:
    """Lay the windows end to end around the cycle (McNaughton's wrap-around rule).

    As many workers run at once as shares add up to, rounded up: never more than there are cores.
    """
    starts = accumulate(shares, initial=0.0)
    return tuple(Window(start % 1.0, share) for start, share in zip(starts, shares, strict=False))


@dataclass
class _Worker:
    """A worker in the cycle: its process group, and how its running time stands to its share."""

    group: int
    runs: bool = True
    owed: float = 0.0  # cycles


class DutyCycle:
    """Lets worker i run for ``share_i`` of the time, by SIGSTOP and SIGCONT to its group.

    On a busy machine a signal goes out late; what a worker ran too long by that, or too little,
    comes off its next window, or on to it. A worker with one busy thread gets its share of a core;
    one with more threads gets more.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = tuple(shares)
        self._windows = windows(shares)
        self._workers: dict[int, _Worker] = {}
        self._clock: float | None = None  # of the last look, in cycles
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="duty-cycle", daemon=True)

    def start(self) -> DutyCycle:
        """Begin to switch."""
        self._thread.start()
        return self

    def cgroups(self) -> Sequence[Path]:
        """None."""
        return ()

    def attach(self, rank: int, pid: int) -> None:
        """Take a worker into the cycle."""
        with self._lock:
            self._workers[rank] = _Worker(pid)

    def apply(self, shares: Sequence[float]) -> None:
        """Change the shares; the thread sees it within a cycle."""
        with self._lock:
            self._shares = tuple(shares)
            self._windows = windows(shares)
            for worker in self._workers.values():
                worker.owed = 0.0

    def release(self, rank: int) -> None:
        """Take a worker out of the cycle, running."""
        with self._lock:
            worker = self._workers.pop(rank, None)
        if worker is not None:
            _send(worker.group, signal.SIGCONT)

    def close(self) -> None:
        """Stop the cycle, with every worker running."""
        self._closed.set()
        self._thread.join()
        for rank in list(self._workers):
            self.release(rank)

    def _run(self) -> None:
        pause = 0.0
        while not self._closed.wait(pause * CYCLE_SECONDS):
            pause = self.switch(time.monotonic() / CYCLE_SECONDS)

    def switch(self, clock: float) -> float:
        """Stop whose window is over, continue whose window has begun.

        Args:
            clock: in cycles since any moment; whole numbers begin a cycle.

        Returns:
            How many cycles may pass until the next call.
        """
        with self._lock:
            last, self._clock = clock if self._clock is None else self._clock, clock
            for rank, worker in self._workers.items():
                owed = worker.owed + (clock - last) * (self._shares[rank] - worker.runs)
                worker.owed = min(max(owed, -1.0), 1.0)  # a long stall is not made good
            if clock // 1.0 > last // 1.0:
                self._windows = windows([self._due(rank) for rank in range(len(self._shares))])
            phase = clock % 1.0
            for rank, worker in self._workers.items():
                if self._windows[rank].contains(phase) != worker.runs:
                    worker.runs = not worker.runs
                    _send(worker.group, signal.SIGCONT if worker.runs else signal.SIGSTOP)
            edges = [self._windows[rank].next_edge(phase) for rank in self._workers]
            return max(min([*edges, 1.0 - phase]), SHORTEST_PAUSE)

    def _due(self, rank: int) -> float:
        """The part of the coming cycle in which a worker should run."""
        worker = self._workers.get(rank)
        return min(max(self._shares[rank] + (worker.owed if worker else 0.0), 0.0), 1.0)


def _send(group: int, signum: signal.Signals) -> None:
    """Signal a process group that may have ended."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return
