"""Measurements of a worker's steps: busy seconds and driving factors."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from lbbsp_core.measure import BusyTimer
from lbbsp_core.resources import ResourceSampler
from lbbsp_core.runtime.exchange.protocol import StepMessage
from lbbsp_core.runtime.reliability.activity import Activity, CurrentActivity

logger = logging.getLogger("lbbsp.session")


class Reading(NamedTuple):
    """Measurement of a step, taken when its barrier is reached.

    Args:
        busy_seconds: Busy seconds since the worker left the last barrier.
        drivers: Driving factors sampled then, the exogenous inputs of the *next* step's forecast.
    """

    busy_seconds: float
    drivers: tuple[float, ...]


class Left(NamedTuple):
    """End of a step, when its barrier is left.

    Args:
        wall_seconds: Seconds since the last barrier was left.
        time: Unix time.
    """

    wall_seconds: float
    time: float


class StepMeter:
    """Times the steps of one worker, samples its resources, and marks steps to exclude.

    It also notes in `activity` whether the worker computes or waits.

    No predictor learns from an *excluded* step: the first one of a fit or an epoch, and one that
    follows an evaluation, a save or a (re)trace (rule 4).
    """

    def __init__(self, activity: CurrentActivity | None = None) -> None:
        self._activity = activity or CurrentActivity()
        self._timer = BusyTimer()
        self._sampler: ResourceSampler | None = None
        self._excluded, self._retraced = True, False
        self._lock = threading.Lock()
        self._waits = 0
        self._timer.start()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sampled resources, in the order of `Reading.drivers`."""
        return self._sampler.names if self._sampler else ()

    def open(self, names: Sequence[str] | None) -> None:
        """Starts sampling the driving factors `names`, unless it is open; None: the default ones.

        On the cores that are in use now.
        """
        if self._sampler is None:
            self._sampler = ResourceSampler(names)

    def close(self) -> None:
        """Stops sampling; forgets waits that a failed step did not end."""
        with self._lock:
            self._waits = 0
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def exclude_step(self, *, retraced: bool = False) -> None:
        """Excludes the running step from learning."""
        self._excluded, self._retraced = True, self._retraced or retraced

    def take_excluded(self) -> bool:
        """Returns whether the running step is excluded, and resets the mark for the next step."""
        excluded, self._excluded = self._excluded, False
        return excluded

    def take_marks(self) -> tuple[bool, bool]:
        """Returns whether the running step is excluded, and traced anew, and resets the marks."""
        retraced, self._retraced = self._retraced, False
        return self.take_excluded(), retraced

    def begin_step(self, step: int) -> None:
        """Restarts the timer if the step is excluded, so that earlier work does not count."""
        self._activity.enter(Activity.COMPUTING, step)
        if self._excluded:
            self._timer.start()

    def begin_wait(self) -> None:
        """Starts a wait that does not count as busy time, on any thread; waits may overlap."""
        with self._lock:
            self._waits += 1
            if self._waits == 1:
                self._timer.pause()
        self._activity.enter(Activity.WAITING)

    def end_wait(self) -> None:
        """Ends a wait that `begin_wait` has started."""
        self._activity.enter(Activity.COMPUTING)
        with self._lock:
            self._waits -= 1
            if self._waits == 0:
                self._timer.resume()

    @contextmanager
    def excluded_wait(self) -> Iterator[None]:
        """Excludes the time spent inside the context from the busy time."""
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    def reach(self) -> Reading:
        """Returns the measurement of the step; call it on reaching the barrier."""
        busy_seconds = self._timer.reach()
        return Reading(busy_seconds, self._sampler.sample() if self._sampler else ())

    def leave(self, step: int | None = None) -> Left:
        """Starts the next step, number `step`, to which what follows belongs."""
        self._activity.enter(Activity.COMPUTING, step)
        return Left(self._timer.leave(), time.time())


def log_waits(step: int, messages: Sequence[StepMessage], wall_seconds: float) -> None:
    """Logs which worker the others waited for in a step, and how long each of them waited."""
    busy = [message.busy_nanoseconds / 1e9 for message in messages]
    longest = max(busy)
    last = busy.index(longest)
    waits = ", ".join(
        f"worker {rank} {longest - x:.4f} s" for rank, x in enumerate(busy) if rank != last
    )
    text = "step %d took %.4f s; waited for worker %d (busy %.4f s): %s"
    logger.debug(text, step, wall_seconds, last, longest, waits or "no other worker")
