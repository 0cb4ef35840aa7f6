"""Measurements of a worker's steps: busy seconds and driving factors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from lbbsp_core.measure import BusyTimer
from lbbsp_core.resources import ResourceSampler


class Reading(NamedTuple):
    """Measurement of a step, taken when its barrier is reached.

    Args:
        busy_seconds: Busy seconds since the worker left the last barrier.
        drivers: Driving factors sampled then, the exogenous inputs of the *next* step's forecast
            unless they are sampled again when the barrier is left.
    """

    busy_seconds: float
    drivers: tuple[float, ...]


class StepMeter:
    """Times the steps of one worker, samples its resources, and marks steps to exclude.

    No predictor learns from an *excluded* step: the first one of a fit or an epoch, and one that
    follows an evaluation, a save or a (re)trace (rule 4).
    """

    def __init__(self) -> None:
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

    @property
    def is_open(self) -> bool:
        """True while resources are sampled."""
        return self._sampler is not None

    def open(self, names: Sequence[str] | None) -> None:
        """Starts sampling the driving factors `names`; None selects the default ones."""
        self.close()
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

    def take_retraced(self) -> bool:
        """Returns whether the running step is traced anew, and resets the mark."""
        retraced, self._retraced = self._retraced, False
        return retraced

    def begin_step(self) -> None:
        """Restarts the timer if the step is excluded, so that earlier work does not count."""
        if self._excluded:
            self._timer.start()

    def begin_wait(self) -> None:
        """Starts a wait that does not count as busy time, on any thread; waits may overlap."""
        with self._lock:
            self._waits += 1
            if self._waits == 1:
                self._timer.pause()

    def end_wait(self) -> None:
        """Ends a wait that `begin_wait` has started."""
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
        return Reading(self._timer.reach(), self.sample())

    def sample(self) -> tuple[float, ...]:
        """Returns the driving factors known now, in the order of `names`."""
        return self._sampler.sample() if self._sampler else ()

    def leave(self) -> float:
        """Starts the next step and returns wall seconds since the last barrier was left."""
        return self._timer.leave()
