"""Sources on Linux: ``/proc`` and ``getrusage``."""

from __future__ import annotations

import os
from typing import Final, final

from lbbsp_core.resources import cgroup
from lbbsp_core.resources.base import Factor
from lbbsp_core.resources.cpu_counters import TICK_SECONDS, Ticks, busy_counter
from lbbsp_core.resources.host import Host, PseudoFile

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

MAX_EVENTS_PER_SECOND: Final = 1e6
"""Upper bound of rates of events; larger ones are errors of measurement."""


@final
class OtherCpuTime:
    """Accumulates the CPU seconds of other processes: those of all processes minus our own.

    The kernel may count the sum in ticks of 10 ms, and counts our own time in nanoseconds, so the
    difference may decrease slightly. A decrease of up to two ticks per core is carried over to
    later calls instead of being cut off at 0, so that rounding errors cancel. A larger decrease
    comes from threads of this process on cores that are not counted, and is dropped.

    Example:
        >>> other = OtherCpuTime(cores=1)
        >>> [other.seconds(total, own) for total, own in ((5.0, 1.0), (5.5, 1.25))]
        [0.0, 0.25]
    """

    def __init__(self, cores: int) -> None:
        self._max_debt = 2 * TICK_SECONDS * cores
        self._previous: tuple[float, float] | None = None
        self._debt = self._sum = 0.0  # debt: <= 0

    def seconds(self, total: float, own: float) -> float:
        """Returns the CPU seconds of other processes since the first call."""
        previous, self._previous = self._previous, (total, own)
        if previous is None or total < previous[0] or own < previous[1]:  # a counter restarted
            return self._sum
        used = (total - previous[0]) - (own - previous[1]) + self._debt
        self._debt = max(min(used, 0.0), -self._max_debt)
        self._sum += max(used, 0.0)
        return self._sum


@final
class CpuTime:
    """CPU time of other processes and of this one, on the cores that this process may use.

    Child processes count as other processes.
    """

    min_interval_seconds = 0.001
    may_block = False

    def __init__(self, host: Host) -> None:
        self._busy, self._own = busy_counter(host), host.process_seconds
        self._other = OtherCpuTime(len(host.cores))
        max_percent = 100.0 * len(host.cores)
        self.factors = (
            Factor("cpu_other_percent", max_percent, 100.0),
            Factor("cpu_own_percent", max_percent, 100.0),
        )

    def read(self) -> tuple[float, ...]:
        """Returns CPU seconds of other processes and of this process."""
        own = self._own()
        return self._other.seconds(self._busy.seconds(), own), own

    def close(self) -> None:
        """Closes the counter's file."""
        self._busy.close()


@final
class CgroupCpuTime:
    """CPU time of other processes in the cgroup of this process, with which it shares a quota."""

    min_interval_seconds = 0.001
    may_block = False

    def __init__(self, host: Host) -> None:
        self._usage, self._own = cgroup.CpuUsage(host), host.process_seconds
        self._other = OtherCpuTime(len(host.cores))
        self.factors = (Factor("cgroup_other_percent", 100.0 * len(host.cores), 100.0),)

    def read(self) -> tuple[float, ...]:
        """Returns CPU seconds of the other processes."""
        own = self._own()
        return (self._other.seconds(self._usage.seconds(), own),)

    def close(self) -> None:
        """Closes the file."""
        self._usage.close()


@final
class StealTime:
    """Time that the hypervisor stole from the cores that this process may use: ``/proc/stat``."""

    min_interval_seconds = 0.001
    may_block = False

    def __init__(self, host: Host) -> None:
        self._ticks = Ticks(host)
        self.factors = (Factor("steal_percent", 100.0 * len(host.cores), 100.0),)

    def read(self) -> tuple[float, ...]:
        """Returns stolen seconds."""
        return (self._ticks.stolen_seconds(),)

    def close(self) -> None:
        """Closes the file."""
        self._ticks.close()


@final
class RunnableTasks:
    """Runnable tasks of the machine, those of this process included: ``/proc/loadavg``."""

    min_interval_seconds = 0.0
    may_block = False
    factors = (Factor("runnable", 1e5),)

    def __init__(self, host: Host) -> None:
        self._file = host.open("/proc/loadavg", 128)

    def read(self) -> tuple[float, ...]:
        """Returns the number of tasks: the 3 in ``0.31 0.25 0.21 3/412 9031``."""
        return (float(self._file.read().split()[3].split(b"/")[0]),)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@final
class ContextSwitches:
    """Involuntary context switches of this process: ``getrusage``."""

    min_interval_seconds = 0.001
    may_block = False
    factors = (Factor("involuntary_switches_per_second", MAX_EVENTS_PER_SECOND, 1.0),)

    def __init__(self, host: Host) -> None:
        self._host = host

    def read(self) -> tuple[float, ...]:
        """Returns the number of switches since the process started."""
        return (float(self._host.involuntary_switches()),)

    def close(self) -> None:
        """Does nothing: no file is open."""


@final
class CpuPressure:
    """Pressure stall information (PSI): time in which a task waited for a core.

    Reads the pressure of the cgroup where version 2 provides it, otherwise of the machine.
    """

    min_interval_seconds = 0.001
    may_block = False
    factors = (Factor("cpu_pressure_percent", 100.0, 100.0),)

    def __init__(self, host: Host) -> None:
        try:
            self._file = host.open(cgroup.own_file(host, "", "cpu.pressure"))
        except OSError:
            self._file = host.open("/proc/pressure/cpu")

    def read(self) -> tuple[float, ...]:
        """Returns seconds, from ``some avg10=0.00 avg60=0.00 avg300=0.00 total=123456``."""
        return (float(self._file.read().split(b"total=", 1)[1].split()[0]) / 1e6,)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@final
class MemoryUsage:
    """Memory in use on the machine or in the cgroup, and resident memory of this process.

    File caches that can be reclaimed at once do not count as in use (``MemAvailable``,
    ``inactive_file``). Usage changes slowly, so it is read twice per second.
    """

    min_interval_seconds = 0.5
    may_block = False
    factors = (Factor("memory_percent"), Factor("memory_own_percent"))

    def __init__(self, host: Host) -> None:
        self._host = host
        self._files: list[PseudoFile] = []
        try:
            self._machine = self._open("/proc/meminfo")
            self._own = self._open("/proc/self/statm", 128)
            self._limit = cgroup.memory_limit(host)
            if self._limit is not None:
                self._usage = self._open(str(self._limit.usage_path), 64)
                self._stat = self._open(str(self._limit.stat_path), 8192)
        except OSError:
            self.close()
            raise

    def _open(self, path: str, size: int = 4096) -> PseudoFile:
        file = self._host.open(path, size)
        self._files.append(file)
        return file

    def read(self) -> tuple[float, ...]:
        """Returns percent of memory in use, and percent used by this process."""
        text = self._machine.read()
        total = _number_after(text, b"MemTotal:") * 1024
        percent = 100 * (1 - _number_after(text, b"MemAvailable:") * 1024 / total)
        if self._limit is not None:
            limit = min(self._limit.limit, total)
            used = int(self._usage.read())
            used -= _number_after(self._stat.read(), self._limit.cache_key)
            total, percent = limit, max(percent, 100 * used / limit)
        resident = int(self._own.read().split()[1]) * PAGE_BYTES
        return percent, 100 * resident / total

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()


def _number_after(text: bytes, key: bytes) -> int:
    """Returns the number after `key` at the start of a line."""
    start = 0 if text.startswith(key) else text.index(b"\n" + key) + 1
    return int(text[start + len(key) : start + len(key) + 32].split(maxsplit=1)[0])
