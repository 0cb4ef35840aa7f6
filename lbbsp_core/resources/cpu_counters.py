"""Counters of the CPU time that all processes together spend on some cores."""

from __future__ import annotations

import os
from typing import Final, Protocol, final

from lbbsp_core.resources import cgroup
from lbbsp_core.resources.host import Host

TICK_SECONDS: Final = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
"""Unit of the times in ``/proc/stat``."""


class BusyCounter(Protocol):
    """CPU seconds of all processes on the cores of a host, since some time in the past."""

    def seconds(self) -> float:
        """Returns the CPU seconds. May raise any exception."""

    def close(self) -> None:
        """Closes the file."""


def busy_counter(host: Host) -> BusyCounter:
    """Returns the finest counter that the host has: nanoseconds, or else ticks of 10 ms."""
    for kind in (CpuAccounting, SchedulerStatistics):
        try:
            counter = kind(host)
            counter.seconds()
        except (OSError, ValueError, IndexError):
            continue
        return counter
    return Ticks(host)


@final
class CpuAccounting:
    """``cpuacct.usage_percpu`` of the root cgroup, version 1, in nanoseconds."""

    def __init__(self, host: Host) -> None:
        groups = cgroup.own_cgroups(host, "cpuacct")
        if not groups or groups[-1].version != 1 or not cgroup.is_root(host, groups[-1]):
            raise FileNotFoundError("the root cgroup of the controller cpuacct is not visible")
        self._cores = sorted(host.cores)
        self._file = host.open(
            groups[-1].path / "cpuacct.usage_percpu", 32 * (max(self._cores) + 1)
        )

    def seconds(self) -> float:
        """Returns the CPU seconds of all processes on our cores."""
        nanoseconds = self._file.read().split()
        return sum(int(nanoseconds[core]) for core in self._cores) / 1e9

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@final
class SchedulerStatistics:
    """Running time of tasks, in nanoseconds: ``/proc/schedstat`` (kernel's sched-stats.rst)."""

    def __init__(self, host: Host) -> None:
        self._file = host.open("/proc/schedstat", 2 * len(host.read_text("/proc/schedstat")))
        self._cores = {b"cpu%d" % core for core in host.cores}

    def seconds(self) -> float:
        """Returns the CPU seconds of all processes on our cores: the seventh number of a core."""
        lines = (line.split() for line in self._file.read().split(b"\n") if line.startswith(b"cpu"))
        running = [int(words[7]) for words in lines if words[0] in self._cores]
        if len(running) < len(self._cores):
            raise ValueError("/proc/schedstat lacks a core: it went offline")
        return sum(running) / 1e9

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@final
class Ticks:
    """Busy and stolen time of cores in ticks: ``/proc/stat``.

    On machines with very many cores the kernel takes long to write this file, which is then read
    in the background.
    """

    def __init__(self, host: Host) -> None:
        text = host.read_text("/proc/stat")
        cpu_lines = text.split("intr", 1)[0]
        self._file = host.open("/proc/stat", len(cpu_lines) + 64 * (cpu_lines.count("\n") + 1))
        names = [line.split(" ", 1)[0] for line in cpu_lines.split("\n")]
        cores = [f"cpu{core}" for core in sorted(host.cores)]
        self._lines = [(names.index(core), core.encode()) for core in cores]
        self._last_line = self._lines[-1][0]

    def seconds(self) -> float:
        """Returns the CPU seconds of all processes on our cores."""
        busy = 0
        for ticks in self._of_cores():  # name user nice system idle iowait irq softirq steal
            busy += int(ticks[1]) + int(ticks[2]) + int(ticks[3]) + int(ticks[6]) + int(ticks[7])
        return busy * TICK_SECONDS

    def stolen_seconds(self) -> float:
        """Returns the seconds in which the hypervisor ran something else on our cores."""
        return sum(int(ticks[8]) for ticks in self._of_cores()) * TICK_SECONDS

    def _of_cores(self) -> list[list[bytes]]:
        """Returns the lines of our cores, split into words."""
        lines = self._file.read().split(b"\n", self._last_line + 1)
        found = [lines[index].split() for index, _ in self._lines]
        for words, (index, core) in zip(found, self._lines, strict=True):
            if words[0] != core:
                raise ValueError(f"line {index} of /proc/stat is not {core!r}: a core went offline")
        return found

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
