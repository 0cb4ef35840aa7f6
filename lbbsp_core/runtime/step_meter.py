"""What a worker measures of its own steps: busy seconds and the resources that drive them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from lbbsp_core.measure import BusyTimer
from lbbsp_core.resources import ResourceSampler


class Reading(NamedTuple):
    """Measurement of a step at the moment its barrier is reached.

    Args:
        busy_seconds: Seconds of the worker's own work since it left the last barrier.
        drivers: Resources sampled now: exogenous inputs of the *next* step's forecast.
    """

    busy_seconds: float
    drivers: tuple[float, ...]


class StepMeter:
    """Times the steps of one worker, samples its resources, and knows which steps to exclude.

    An *excluded* step is not learned from: the first one of a fit or an epoch, and one that
    follows an evaluation, a save or a (re)trace (rule 4).
    """

    def __init__(self) -> None:
        self._timer = BusyTimer()
        self._sampler: ResourceSampler | None = None
        self._excluded = True
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
        """Starts to sample the resources `names` (None: the default ones) on the cores in use."""
        self.close()
        self._sampler = ResourceSampler(names)

    def close(self) -> None:
        """Stops sampling; forgets waits that a failed step did not end."""
        with self._lock:
            self._waits = 0
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def exclude_step(self) -> None:
        """Excludes the running step: nothing is learned from its time.

        What drove an evaluation does not drive a step: the next sample covers the time from now.
        """
        self._sample()
        self._excluded = True

    def take_excluded(self) -> bool:
        """Returns whether the running step is excluded; the next one is not, unless asked for."""
        excluded, self._excluded = self._excluded, False
        return excluded

    def begin_step(self) -> None:
        """Restarts the clock if the step is excluded: what came before it does not count."""
        if self._excluded:
            self._sample()
            self._timer.start()

    def begin_wait(self) -> None:
        """Starts a wait that is not busy time, on any thread; several may overlap."""
        with self._lock:
            self._waits += 1
            if self._waits == 1:
                self._timer.pause()

    def end_wait(self) -> None:
        """Ends what `begin_wait` has started."""
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
        """Measures the step: its barrier is reached."""
        return Reading(self._timer.reach(), self._sample())

    def leave(self) -> float:
        """Leaves the barrier. Returns wall seconds since the last one was left."""
        return self._timer.leave()

    def _sample(self) -> tuple[float, ...]:
        return self._sampler.sample() if self._sampler else ()
