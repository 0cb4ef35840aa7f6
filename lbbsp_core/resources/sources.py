"""Sources of driving factors: ``/proc``, cgroups, psutil and ``getrusage``.

Linux has all of them. Elsewhere, those that read ``/proc`` or cgroups raise OSError, and are left
out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple, TypeAlias, final

from lbbsp_core.resources import cgroup
from lbbsp_core.resources.base import Factor, Source
from lbbsp_core.resources.host import Host, PseudoFile

TICK_SECONDS: Final = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
"""Unit of the times in ``/proc/stat``."""

MAX_EVENTS_PER_SECOND: Final = 1e6
"""Upper bound of rates of events; larger ones are errors of measurement."""

MEMORY_SECONDS: Final = 0.5
"""Seconds between two readings of memory, which changes slowly."""


@final
@dataclass(frozen=True)
class HostSource:
    """Source that reads files or asks the kernel, and never waits for a lock."""

    factors: tuple[Factor, ...]
    read: Callable[[], tuple[float, ...]]
    files: Sequence[PseudoFile] = ()
    min_interval_seconds: float = 0.001
    may_block: bool = False

    def close(self) -> None:
        """Closes the files."""
        for file in self.files:
            file.close()


class Counter(NamedTuple):
    """CPU seconds since some time in the past, and the files that they are read from."""

    seconds: Callable[[], float]
    files: tuple[PseudoFile, ...] = ()


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


def cpu_time(host: Host) -> HostSource:
    """CPU time of other processes and of this one, on the cores that this process may use.

    Child processes count as other processes.
    """
    busy, other = _busy_counter(host), OtherCpuTime(len(host.cores))

    def read() -> tuple[float, ...]:
        own = host.process_seconds()
        return other.seconds(busy.seconds(), own), own

    limits = 100.0 * len(host.cores), 100.0
    factors = Factor("cpu_other_percent", *limits), Factor("cpu_own_percent", *limits)
    return HostSource(factors, read, busy.files)


def _busy_counter(host: Host) -> Counter:
    """Returns the finest counter that the host has: nanoseconds, or else ticks of 10 ms."""
    for counter_of in (_root_accounting, _scheduler_statistics):
        with suppress(OSError, ValueError, IndexError):
            counter = counter_of(host)
            counter.seconds()
            return counter
    return Counter(_ticks(host, "user", "nice", "system", "irq", "softirq"))


def _root_accounting(host: Host) -> Counter:
    """Reads ``cpuacct.usage_percpu`` of the root cgroup, version 1, in nanoseconds."""
    groups = cgroup.own_cgroups(host, "cpuacct")
    if not groups or groups[-1].version != 1 or not cgroup.is_root(host, groups[-1]):
        raise FileNotFoundError("the root cgroup of the controller cpuacct is not visible")
    file = host.open(groups[-1].path / "cpuacct.usage_percpu", 32 * (max(host.cores) + 1))

    def seconds() -> float:
        nanoseconds = file.read().split()
        return sum(int(nanoseconds[core]) for core in host.cores) / 1e9

    return Counter(seconds, (file,))


def _scheduler_statistics(host: Host) -> Counter:
    """Reads the running time of tasks, in nanoseconds: ``/proc/schedstat`` (sched-stats.rst)."""
    file = host.open("/proc/schedstat", 2 * len(host.read_text("/proc/schedstat")))
    cores = {b"cpu%d" % core for core in host.cores}

    def seconds() -> float:
        lines = (line.split() for line in file.read().split(b"\n") if line.startswith(b"cpu"))
        running = [int(words[7]) for words in lines if words[0] in cores]
        if len(running) < len(cores):
            raise ValueError("/proc/schedstat lacks a core: it went offline")
        return sum(running) / 1e9

    return Counter(seconds, (file,))


def _ticks(host: Host, *kinds: str) -> Callable[[], float]:
    """Returns a function that sums the seconds of our cores in these kinds of use.

    On machines with very many cores the kernel takes long to count, and the source is read in the
    background.
    """
    first: Sequence[Any] = host.core_times()
    try:  # psutil leaves out the numbers of the cores, and those that are offline
        stat = host.read_text("/proc/stat")
        online = [int(number) for number in re.findall(r"^cpu(\d+) ", stat, re.MULTILINE)]
    except OSError:  # not on Linux
        online = list(range(len(first)))
    places = [online.index(core) for core in host.cores if core in online[: len(first)]]
    if len(places) < len(host.cores) or not hasattr(first[0], kinds[0]):
        raise OSError(f"the seconds of {kinds[0]} of our cores are not counted here")

    def seconds() -> float:
        times = host.core_times()
        if len(times) != len(first):  # cores are told by their place alone
            raise ValueError("a core went offline")
        return float(sum(getattr(times[place], k, 0.0) for place in places for k in kinds))

    return seconds


def cgroup_cpu_time(host: Host) -> HostSource:
    """CPU time of other processes in the cgroup of this process, with which it shares a quota."""
    usage, other = _cgroup_usage(host), OtherCpuTime(len(host.cores))
    return HostSource(
        (Factor("cgroup_other_percent", 100.0 * len(host.cores), 100.0),),
        # Our own time first: it never exceeds what the cgroup has used when it is read.
        lambda: (other.seconds(own=host.process_seconds(), total=usage.seconds()),),
        usage.files,
    )


def _cgroup_usage(host: Host) -> Counter:
    """Counts the CPU time of our innermost cgroup, its children included.

    Version 2 has it in ``cpu.stat``, with or without a CPU controller; version 1 in
    ``cpuacct.usage``.
    """
    for own in (group for name in ("cpuacct", "") for group in cgroup.own_cgroups(host, name)[:1]):
        if not cgroup.is_root(host, own):
            name = "cpuacct.usage" if own.version == 1 else "cpu.stat"
            file = host.open(own.path / name, 2048)
            break
    else:
        raise FileNotFoundError("this process is in no cgroup below the root that shows CPU time")

    def seconds() -> float:
        words = file.read().split()
        if len(words) == 1:  # version 1: nanoseconds
            return int(words[0]) / 1e9
        return int(words[words.index(b"usage_usec") + 1]) / 1e6

    return Counter(seconds, (file,))


def steal_time(host: Host) -> HostSource:
    """Time that the hypervisor stole from the cores that this process may use."""
    stolen = _ticks(host, "steal")
    factor = Factor("steal_percent", 100.0 * len(host.cores), 100.0)
    return HostSource((factor,), lambda: (stolen(),))


def runnable_tasks(host: Host) -> HostSource:
    """Runnable tasks of the machine, those of this process included: ``/proc/loadavg``.

    Where there is no such file: the load of the last minute, which psutil emulates on Windows.
    """
    factors = (Factor("runnable", 1e5),)
    try:
        file = host.open("/proc/loadavg", 128)
    except OSError:
        import psutil

        return HostSource(factors, lambda: psutil.getloadavg()[:1], min_interval_seconds=0.0)
    return HostSource(
        factors,
        lambda: (float(file.read().split()[3].split(b"/")[0]),),  # 0.31 0.25 0.21 3/412 9031
        (file,),
        min_interval_seconds=0.0,
    )


def context_switches(host: Host) -> HostSource:
    """Involuntary context switches of this process: ``getrusage``."""
    factor = Factor("involuntary_switches_per_second", MAX_EVENTS_PER_SECOND, 1.0)
    return HostSource((factor,), lambda: (float(host.involuntary_switches()),))


def cpu_pressure(host: Host) -> HostSource:
    """Pressure stall information (PSI): time in which a task waited for a core.

    Reads the pressure of the cgroup where version 2 provides it, otherwise of the machine.
    """
    paths = [group.path / "cpu.pressure" for group in cgroup.own_cgroups(host, "")[:1]]
    paths = [path for path in paths if host.resolve(path).exists()]
    file = host.open((*paths, PurePosixPath("/proc/pressure/cpu"))[0])
    return HostSource(
        (Factor("cpu_pressure_percent", 100.0, 100.0),),
        # some avg10=0.00 avg60=0.00 avg300=0.00 total=123456, in microseconds
        lambda: (float(file.read().split(b"total=", 1)[1].split()[0]) / 1e6,),
        (file,),
    )


def cpu_throttling(host: Host) -> HostSource:
    """Throttling by CPU quotas: ``cpu.stat`` of the cgroup and of its ancestors.

    The ancestors are included because a quota at any level throttles this process.
    """
    paths = [group.path / "cpu.stat" for group in cgroup.own_cgroups(host, "cpu")]
    files = [host.open(path, 2048) for path in paths if host.resolve(path).is_file()]
    if not files:
        raise FileNotFoundError("this process is in no cgroup with a CPU controller")

    def read() -> tuple[float, ...]:
        seconds, periods = 0.0, 0
        for file in files:
            words = file.read().split()
            for key, number in zip(words[::2], words[1::2], strict=False):
                if key == b"nr_throttled":
                    periods += int(number)
                elif key == b"throttled_usec":
                    seconds += int(number) / 1e6
                elif key == b"throttled_time":  # version 1
                    seconds += int(number) / 1e9
        return seconds, float(periods)

    factors = (
        Factor("throttled_percent", 100.0 * len(host.cores), 100.0),
        Factor("throttled_periods_per_second", 1e6, 1.0),
    )
    return HostSource(factors, read, files)


def memory(host: Host) -> HostSource:
    """Memory in use on the machine or in the cgroup, and resident memory of this process.

    File caches that can be reclaimed at once do not count as in use (``MemAvailable``,
    ``inactive_file``).
    """
    limit = cgroup.memory_limit(host)
    paths = () if limit is None else (limit.usage_path, limit.stat_path)
    files = [host.open(path, 8192) for path in paths]

    def read() -> tuple[float, ...]:
        total, available = host.memory()
        percent = 100 * (1 - available / total)
        if limit is not None:
            usage, stat = (file.read() for file in files)
            words = stat.split()
            used = int(usage) - int(words[words.index(limit.cache_key) + 1])
            total = min(limit.limit, total)
            percent = max(percent, 100 * used / total)
        return percent, 100 * host.resident() / total

    factors = Factor("memory_percent"), Factor("memory_own_percent")
    return HostSource(factors, read, files, min_interval_seconds=MEMORY_SECONDS)


SourceFactory: TypeAlias = Callable[[Host], Source]

SOURCES: Final[Mapping[str, SourceFactory]] = {
    "cpu_other_percent": cpu_time,
    "cpu_own_percent": cpu_time,
    "cgroup_other_percent": cgroup_cpu_time,
    "steal_percent": steal_time,
    "runnable": runnable_tasks,
    "involuntary_switches_per_second": context_switches,
    "memory_percent": memory,
    "memory_own_percent": memory,
    "throttled_percent": cpu_throttling,
    "throttled_periods_per_second": cpu_throttling,
    "cpu_pressure_percent": cpu_pressure,
}
"""What opens the source of each driving factor, except those of GPUs."""
