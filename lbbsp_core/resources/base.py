"""Source of driving factors, and the names of the factors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

DESCRIPTIONS: Final = {
    "cpu_other_percent": "CPU time of other processes on the cores of this process; "
    "100 is one core",
    "runnable": "runnable tasks on this machine at the time of sampling",
    "memory_percent": "memory in use, of the machine or of the limit of the cgroup; the larger one",
    "throttled_percent": "time throttled by the CPU quota of the cgroup; 100 is one core",
    "steal_percent": "CPU time stolen by the hypervisor on the cores of this process; "
    "100 is one core",
    "cgroup_other_percent": "CPU time of other processes in the cgroup of this process; "
    "100 is one core",
    "gpu_percent": "GPU utilisation, of all processes",
    "gpu_memory_percent": "GPU memory in use, by all processes",
}
"""Names of all driving factors, with their descriptions."""

WINDOW_SECONDS: Final = 0.05
"""Shortest window over which rates are means: five ticks of the coarsest counters."""

FACTORS: Final = tuple(DESCRIPTIONS)
"""Names of all driving factors, in the order in which workers exchange them."""


class Factor(NamedTuple):
    """Conversion of a number that a source reads into a driving factor."""

    name: str  # a key of `DESCRIPTIONS`
    max_value: float = 100.0  # the lower bound is 0
    # Whether the number is a running total of seconds, of whose increase the factor is the percent
    # of the time that has passed. Otherwise the number itself is the factor.
    is_total: bool = False


@dataclass(frozen=True)
class Source:
    """Source of numbers. What makes it raises an exception if it is unavailable."""

    factors: tuple[Factor, ...]
    read: Callable[[], tuple[float, ...]]  # a number for each factor; may raise any exception
    min_interval_seconds: float = 0.001  # between two readings; longer if levels change slowly
    # Whether calls may wait for a lock, for example of a driver. Such a source is only read in the
    # background, and not closed in a forked child.
    may_block: bool = False


Reading = tuple[float, tuple[float, ...]]
"""Time at which a source was read (monotonic seconds), and the numbers it returned."""


class Meter:
    """Converts the readings of one source into the values of its driving factors.

    A rate is a mean over the *freshest window*: from the newest reading that is at least
    `WINDOW_SECONDS` old until the last one. What slows a worker down now says more about its next
    step than the mean over its last one. Until the readings span a window, and if the total has
    decreased (the counter has wrapped or restarted) or is NaN, a factor keeps its last value.

    Example:
        >>> factors = (Factor("steal_percent", max_value=200.0, is_total=True),)
        >>> meter = Meter(factors, (10.0, (7.0,)), ["steal_percent"])
        >>> meter.add((12.0, (7.5,)))
        >>> meter.values()                           # 0.5 seconds in 2 seconds
        {'steal_percent': 25.0}
        >>> meter.add((12.5, (7.5,)))
        >>> meter.values()                           # since 12.0
        {'steal_percent': 0.0}
    """

    def __init__(self, factors: tuple[Factor, ...], first: Reading, names: Collection[str]) -> None:
        self._wanted = [(i, *factor) for i, factor in enumerate(factors) if factor.name in names]
        self._readings = deque([first])  # the first is the start of the window
        self._values = {name: 0.0 for _, name, *_ in self._wanted}
        # Whether a wanted factor is a rate, which needs readings at the start of a window.
        self.has_rates: Final = any(is_total for *_, is_total in self._wanted)

    def add(self, reading: Reading) -> None:
        """Adds a reading; it replaces the last one if no time has passed, or time went back."""
        readings, (now, _) = self._readings, reading
        while len(readings) > 1 and now <= readings[-1][0]:
            readings.pop()
        readings.append(reading)
        while len(readings) > 1 and readings[1][0] <= now - WINDOW_SECONDS:
            readings.popleft()

    def values(self) -> dict[str, float]:
        """Returns the driving factors at the last reading."""
        (then, old), (now, new) = self._readings[0], self._readings[-1]
        seconds = now - then
        for index, name, max_value, is_total in self._wanted:
            value = new[index]
            if is_total:
                value -= old[index]
                if seconds < WINDOW_SECONDS or value < 0:
                    continue
                value *= 100.0 / seconds
            if value == value:  # not NaN
                self._values[name] = min(max(value, 0.0), max_value)
        return self._values
