"""Workers that are exactly as fast as a script says, however fast and busy their machine is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from lbbsp_core.measure import BusyTimer, OverlapTimer
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_core.runtime.planning.running_step import StepMeter


class VirtualTime:
    """Clock of a worker's meter, on which no time passes but what a script lets pass.

    Args:
        meter: Meter of the worker's session, before its first step.
        wait_seconds: Seconds that each wait for a collective inside a step takes.
    """

    def __init__(self, meter: StepMeter, wait_seconds: float = 0.0) -> None:
        self._now = self._wait = 0
        meter._timer, meter.overlap = BusyTimer(lambda: self._now), OverlapTimer(lambda: self._now)
        leave, end_wait = meter.leave, meter.end_wait

        def left(step=None):
            self._now += self._wait
            self._wait = 0
            return leave(step)

        def ended_wait():
            self._now += round(wait_seconds * 1e9)
            end_wait()

        meter.leave, meter.end_wait = left, ended_wait

    def compute(self, seconds: float, slowest: float = 0.0) -> None:
        """Lets the seconds of a batch pass, and at the next barrier those until the slowest's."""
        self._now += round(seconds * 1e9)
        self._wait = max(round((slowest - seconds) * 1e9), 0)


class Unequal:
    """Workers that each take some seconds for a sample: call it where the worker computes.

    Args:
        session: The worker's session, before its first step.
        seconds: Seconds for a sample, by rank.
        folder: Where workers mark the barriers that they reach, the same on all of them. If given,
            the last worker goes on computing until the others have reached the barrier: a worker
            that read its time behind the barrier would never reach it.
        wait_seconds: See `VirtualTime`.
    """

    def __init__(
        self,
        session: WorkerSession,
        seconds: Sequence[float],
        folder: Path | None = None,
        wait_seconds: float = 0.0,
    ) -> None:
        self._session, self._seconds, self._folder = session, seconds, folder
        self._time = VirtualTime(session.meter, wait_seconds)
        self._computed = self._reached = 0
        reach = session.meter.reach

        def reached():
            reading = reach()
            self._barrier(self._reached, session.rank).touch()
            self._reached += 1
            return reading

        if folder:
            session.meter.reach = reached

    def __call__(self) -> None:
        """Computes the batch of the running step."""
        rank, last = self._session.rank, self._session.workers - 1
        # In its first step, a worker may still have to meet the others before it measures.
        waits = self._folder and self._computed and rank == last
        for other in range(last) if waits else ():
            while not self._barrier(self._computed, other).exists():
                time.sleep(0.001)
        self._computed += 1
        busy = [each * size for each, size in zip(self._seconds, self._session.sizes, strict=True)]
        self._time.compute(busy[rank], max(busy))

    def _barrier(self, step: int, rank: int) -> Path:
        return self._folder / f"reached-{step}-{rank}"
