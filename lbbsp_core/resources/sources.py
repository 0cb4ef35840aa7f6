"""Sources of driving factors: ``/proc``, cgroups and psutil.

Linux has all of them. Elsewhere, those that read ``/proc`` or cgroups raise OSError, and are left
out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, final

from lbbsp_core.resources import cgroup
from lbbsp_core.resources.base import Factor, Source
from lbbsp_core.resources.gpu import gpu_use
from lbbsp_core.resources.host import Host

TICK_SECONDS: Final = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
"""Unit of the times in ``/proc/stat``."""

MEMORY_SECONDS: Final = 0.5
"""Seconds between two readings of memory, which changes slowly."""

Counter: TypeAlias = Callable[[], float]
"""Returns CPU seconds since some time in the past."""


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


def cpu_time(host: Host) -> Source:
    """CPU time of other processes, on the cores that this process may use.

    Child processes count as other processes.
    """
    return _cpu_percent("cpu_other", host, _of_others(host, _busy_counter(host)))


def _cpu_percent(name: str, host: Host, seconds: Counter) -> Source:
    """Returns the source of a factor of seconds on our cores."""
    factor = Factor(f"{name}_percent", 100.0 * len(host.cores), is_total=True)
    return Source((factor,), lambda: (seconds(),))


def _of_others(host: Host, counter: Counter) -> Counter:
    """Returns the seconds that `counter` counts for other processes."""
    other = OtherCpuTime(len(host.cores))
    # Our own time first: it never exceeds what the cgroup has used when it is read.
    return lambda: other.seconds(own=host.process_seconds(), total=counter())


def _busy_counter(host: Host) -> Counter:
    """Returns the finest counter that the host has: nanoseconds, or else ticks of 10 ms."""
    for counter_of in (_root_accounting, _scheduler_statistics):
        with suppress(OSError, ValueError, IndexError):
            counter = counter_of(host)
            counter()
            return counter
    return _ticks(host, "user", "nice", "system", "irq", "softirq")


def _root_accounting(host: Host) -> Counter:
    """Reads ``cpuacct.usage_percpu`` of the root cgroup, version 1, in nanoseconds."""
    groups = cgroup.own_cgroups(host, "cpuacct")
    if not groups or groups[-1].version != 1 or not cgroup.is_root(host, groups[-1]):
        raise FileNotFoundError("the root cgroup of the controller cpuacct is not visible")
    read = host.open(groups[-1].path / "cpuacct.usage_percpu", 32 * (max(host.cores) + 1))

    def seconds() -> float:
        nanoseconds = read().split()
        return sum(int(nanoseconds[core]) for core in host.cores) / 1e9

    return seconds


def _scheduler_statistics(host: Host) -> Counter:
    """Reads the running time of tasks, in nanoseconds: ``/proc/schedstat`` (sched-stats.rst)."""
    read = host.open("/proc/schedstat", 2 * len(host.read_text("/proc/schedstat")))
    cores = {b"cpu%d" % core for core in host.cores}

    def seconds() -> float:
        lines = (line.split() for line in read().split(b"\n") if line.startswith(b"cpu"))
        running = [int(words[7]) for words in lines if words[0] in cores]
        if len(running) < len(cores):
            raise ValueError("/proc/schedstat lacks a core: it went offline")
        return sum(running) / 1e9

    return seconds


def _ticks(host: Host, *kinds: str) -> Counter:
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


def cgroup_cpu_time(host: Host) -> Source:
    """CPU time of other processes in the cgroup of this process, with which it shares a quota."""
    return _cpu_percent("cgroup_other", host, _of_others(host, _cgroup_usage(host)))


def _cgroup_usage(host: Host) -> Counter:
    """Counts the CPU time of our innermost cgroup, its children included.

    Version 2 has it in ``cpu.stat``, with or without a CPU controller; version 1 in
    ``cpuacct.usage``.
    """
    owns = [group for name in ("cpuacct", "") for group in cgroup.own_cgroups(host, name)[:1]]
    below = [group for group in owns if not cgroup.is_root(host, group)]
    if not below:
        raise FileNotFoundError("this process is in no cgroup below the root that shows CPU time")
    version, path = below[0]
    read = host.open(path / ("cpuacct.usage" if version == 1 else "cpu.stat"))

    def seconds() -> float:
        words = read().split()
        if len(words) == 1:  # version 1: nanoseconds
            return int(words[0]) / 1e9
        return int(words[words.index(b"usage_usec") + 1]) / 1e6

    return seconds


def steal_time(host: Host) -> Source:
    """Time that the hypervisor stole from the cores that this process may use."""
    return _cpu_percent("steal", host, _ticks(host, "steal"))


def runnable_tasks(host: Host) -> Source:
    """Runnable tasks of the machine, those of this process included: ``/proc/loadavg``.

    Where there is no such file: the load of the last minute, which psutil emulates on Windows.
    """
    factors = (Factor("runnable", 1e5),)
    try:
        read = host.open("/proc/loadavg")
    except OSError:
        return Source(factors, lambda: (host.load(),), min_interval_seconds=0.0)
    return Source(
        factors,
        lambda: (float(read().split()[3].split(b"/")[0]),),  # 0.31 0.25 0.21 3/412 9031
        min_interval_seconds=0.0,
    )


def cpu_throttling(host: Host) -> Source:
    """Throttling by CPU quotas: ``cpu.stat`` of the cgroup and of its ancestors.

    The ancestors are included because a quota at any level throttles this process.
    """
    paths = [group.path / "cpu.stat" for group in cgroup.own_cgroups(host, "cpu")]
    readers = [host.open(path) for path in paths if host.resolve(path).is_file()]
    if not readers:
        raise FileNotFoundError("this process is in no cgroup with a CPU controller")

    def seconds() -> float:
        sums = dict.fromkeys((b"throttled_usec", b"throttled_time"), 0)
        for read_file in readers:
            words = read_file().split()
            for key in sums.keys() & words:
                sums[key] += int(words[words.index(key) + 1])
        microseconds, nanoseconds = sums.values()  # the latter in version 1
        return microseconds / 1e6 + nanoseconds / 1e9

    return _cpu_percent("throttled", host, seconds)


def memory(host: Host) -> Source:
    """Memory in use, of the machine or of the limit of the cgroup; the larger one.

    File caches that can be reclaimed at once do not count as in use (``MemAvailable``,
    ``inactive_file``).
    """
    limit = cgroup.memory_limit(host)
    paths = () if limit is None else (limit.usage_path, limit.stat_path)
    readers = [host.open(path, 8192) for path in paths]

    def read() -> tuple[float, ...]:
        total, available = host.memory()
        percent = 100 * (1 - available / total)
        if limit is not None:
            (usage,), words = (read_file().split() for read_file in readers)
            used = int(usage) - int(words[words.index(limit.cache_key) + 1])
            percent = max(percent, 100 * used / min(limit.limit, total))
        return (percent,)

    return Source((Factor("memory_percent"),), read, min_interval_seconds=MEMORY_SECONDS)


SOURCES: Final[Mapping[Callable[[Host], Source], str]] = {
    cpu_time: "cpu_other_percent",
    cgroup_cpu_time: "cgroup_other_percent",
    steal_time: "steal_percent",
    runnable_tasks: "runnable",
    memory: "memory_percent",
    cpu_throttling: "throttled_percent",
    gpu_use: "gpu_percent gpu_memory_percent",
}
"""What opens each source, with the names of its driving factors."""
