"""Emulated slowness without CPU quotas: stops and continues each worker on a short cycle."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

from lbbsp_core.processes.spawn import signal_group

CYCLE_SECONDS: Final = 0.02
MIN_PAUSE_CYCLES: Final = 0.01  # bounds the cost of an edge that rounding puts just ahead


class Window(NamedTuple):
    """Part of the cycle in which a worker runs: from ``start`` on, for ``share`` of the cycle."""

    start: float
    share: float

    def contains(self, phase: float) -> bool:
        """Returns whether the worker runs at this phase of the cycle, in [0, 1)."""
        return (phase - self.start) % 1.0 < self.share

    def next_edge(self, phase: float) -> float:
        """Returns the fraction of a cycle until the worker is next stopped or continued."""
        since = (phase - self.start) % 1.0
        return (self.share if since < self.share else 1.0) - since


def windows(shares: Sequence[float]) -> tuple[Window, ...]:
    """Places the windows end to end around the cycle (McNaughton's wrap-around rule).

    At most ``ceil(sum(shares))`` workers run at once, so never more than there are cores.
    """
    starts = accumulate(shares, initial=0.0)
    return tuple(Window(start % 1.0, share) for start, share in zip(starts, shares, strict=False))


@dataclass
class _Worker:
    """Worker in the cycle.

    Args:
        group: Process group.
        runs: Whether it runs, as opposed to being stopped.
        debt: Running time that it has missed, in cycles; negative where it ran too long.
    """

    group: int
    runs: bool = True
    debt: float = 0.0


class DutyCycle:
    """Lets worker i run for ``share_i`` of the time, by SIGSTOP and SIGCONT to its group.

    On a busy machine a signal is sent late; the difference between a worker's running time and its
    share is added to its next window. A worker with one busy thread gets its share of a core; one
    with more threads gets more.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = tuple(shares)
        self._windows = windows(shares)
        self._workers: dict[int, _Worker] = {}
        self._clock: float | None = None  # at the last switch, in cycles
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="duty-cycle", daemon=True)

    def start(self) -> DutyCycle:
        """Starts the thread that stops and continues the workers."""
        self._thread.start()
        return self

    def cgroups(self) -> Sequence[Path]:
        """Returns an empty sequence: the duty cycle uses no cgroups."""
        return ()

    def cgroups_of(self, rank: int) -> Sequence[Path]:
        """Returns an empty sequence."""
        return ()

    def attach(self, rank: int, pid: int) -> None:
        """Adds a worker to the cycle."""
        with self._lock:
            self._workers[rank] = _Worker(pid)

    def apply(self, shares: Sequence[float]) -> None:
        """Changes the shares, with effect within a cycle."""
        with self._lock:
            self._shares = tuple(shares)
            self._windows = windows(shares)
            for worker in self._workers.values():
                worker.debt = 0.0

    def release(self, rank: int) -> None:
        """Removes a worker from the cycle and continues it."""
        with self._lock:
            worker = self._workers.pop(rank, None)
        if worker is not None:
            signal_group(worker.group, signal.SIGCONT)

    def close(self) -> None:
        """Ends the cycle and continues every worker."""
        self._closed.set()
        self._thread.join()
        for rank in list(self._workers):
            self.release(rank)

    def _run(self) -> None:
        pause = 0.0
        while not self._closed.wait(pause * CYCLE_SECONDS):
            pause = self.switch(time.monotonic() / CYCLE_SECONDS)

    def switch(self, clock: float) -> float:
        """Stops the workers whose window has ended and continues those whose window has started.

        Returns the number of cycles until the next call is due.
        """
        with self._lock:
            last, self._clock = clock if self._clock is None else self._clock, clock
            for rank, worker in self._workers.items():
                debt = worker.debt + (clock - last) * (self._shares[rank] - worker.runs)
                worker.debt = min(max(debt, -1.0), 1.0)  # a long stall is not compensated
            if clock // 1.0 > last // 1.0:
                ranks = range(len(self._shares))
                self._windows = windows([self._next_share(rank) for rank in ranks])
            phase = clock % 1.0
            for rank, worker in self._workers.items():
                if self._windows[rank].contains(phase) != worker.runs:
                    worker.runs = not worker.runs
                    signal_group(worker.group, signal.SIGCONT if worker.runs else signal.SIGSTOP)
            edges = [self._windows[rank].next_edge(phase) for rank in self._workers]
            return max(min([*edges, 1.0 - phase]), MIN_PAUSE_CYCLES)

    def _next_share(self, rank: int) -> float:
        """Returns the fraction of the next cycle in which a worker should run."""
        worker = self._workers.get(rank)
        return min(max(self._shares[rank] + (worker.debt if worker else 0.0), 0.0), 1.0)
