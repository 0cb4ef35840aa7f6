"""What a source of driving factors is, and what the factors are called."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple, Protocol

NAMES: Final = {
    "cpu_other_percent": "CPU time others took on the cores we may use; 100 is one core",
    "runnable": "tasks of this machine that run or want to, now",
    "involuntary_switches_per_second": "how often our threads had to leave a core",
    "memory_percent": "memory in use: the machine's, or our cgroup's of its limit, the fuller one",
    "throttled_percent": "time our cgroups were held back by their CPU quota; 100 is one core",
    "steal_percent": "CPU time the hypervisor kept from our cores; 100 is one core",
    "gpu_percent": "share of time the GPU computed, whoever asked it to",
    "gpu_memory_percent": "share of the GPU's memory in use, whoever uses it",
    "cpu_own_percent": "CPU time of this process, all threads; 100 is one core",
    "cpu_pressure_percent": "share of time in which some task waited for a core",
    "throttled_periods_per_second": "quota periods in which our cgroups were held back",
    "memory_own_percent": "this process's resident memory, of the machine's or the cgroup's limit",
}
"""All driving factors, and what they mean."""


class Factor(NamedTuple):
    """How a number that a source reads becomes a driving factor.

    Args:
        name: One of `NAMES`.
        most: Largest value that is believed; the smallest is 0.
        per_second: What an increase of 1 in a second counts as. None: the number is the factor.
    """

    name: str
    most: float = 100.0
    per_second: float | None = None


class Source(Protocol):
    """One origin of numbers. Opening it (`__init__`) raises OSError where there is none."""

    @property
    def factors(self) -> tuple[Factor, ...]:
        """What the numbers stand for."""

    @property
    def shortest(self) -> float:
        """Seconds between two readings: more where totals are coarse or levels change slowly."""

    def read(self) -> tuple[float, ...]:
        """A number for each of `factors`. May raise."""

    def close(self) -> None:
        """Let go of what is open."""


Reading = tuple[float, tuple[float, ...]]
"""When a source was read (seconds, monotonic), and the number of each factor."""


class Meter:
    """Turns the readings of one source into the values of its driving factors.

    A total that went down (a counter that wrapped or started again) and a number that is none
    leave the last value; so does an interval that is empty or goes backwards.

    Args:
        factors: Of the source.
        first: Reading from which rates are counted.
        names: Which of the factors are asked for.

    Example:
        >>> factors = (Factor("steal_percent", most=200.0, per_second=100.0),)
        >>> meter = Meter(factors, (10.0, (7.0,)), ["steal_percent"])
        >>> meter.values((12.0, (7.5,)))             # half a second in two
        {'steal_percent': 25.0}
        >>> meter.values((14.0, (0.1,)))             # started again
        {'steal_percent': 25.0}
    """

    def __init__(self, factors: tuple[Factor, ...], first: Reading, names: Collection[str]) -> None:
        self._wanted = [(i, *factor) for i, factor in enumerate(factors) if factor.name in names]
        self._before, self._values = first, {name: 0.0 for _, name, *_ in self._wanted}

    def values(self, reading: Reading) -> dict[str, float]:
        """The driving factors as of `reading`, rates being means since the last one."""
        (then, old), (now, new) = self._before, reading
        self._before, seconds = reading, now - then
        for index, name, most, per_second in self._wanted:
            value = new[index]
            if per_second is not None:
                value -= old[index]
                if seconds <= 0 or value < 0:
                    continue
                value *= per_second / seconds
            if value == value:  # is a number
                self._values[name] = min(max(value, 0.0), most)
        return self._values
