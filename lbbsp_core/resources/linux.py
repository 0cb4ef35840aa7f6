"""What Linux tells in /proc, and what a process is told about itself."""

from __future__ import annotations

import os
from typing import Final, final

from lbbsp_core.resources import cgroup
from lbbsp_core.resources.base import Factor
from lbbsp_core.resources.host import File, Host

TICK: Final = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
"""Seconds: the unit of /proc/stat."""

PAGE: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

MOST_EVENTS: Final = 1e6
"""A second; more is a mistake."""


@final
class Others:
    """CPU seconds taken by everybody but us, from totals of all and of us.

    The kernel counts all in ticks of 10 ms and us in nanoseconds, so that their difference may
    shrink a little. Up to two ticks a core of that are made up for later instead of being cut
    off: noise then cancels. More is a thread of ours on a core that is not ours, and is not.

    Example:
        >>> others = Others(cores=1)
        >>> [others.seconds(everybody, own) for everybody, own in ((5.0, 1.0), (5.5, 1.25))]
        [0.0, 0.25]
    """

    def __init__(self, cores: int) -> None:
        self._slack = 2 * TICK * cores
        self._before: tuple[float, float] | None = None
        self._owed = self._total = 0.0

    def seconds(self, everybody: float, own: float) -> float:
        """CPU seconds of others since the first call."""
        before, self._before = self._before, (everybody, own)
        if before is None or everybody < before[0] or own < before[1]:  # started again
            return self._total
        taken = (everybody - before[0]) - (own - before[1]) + self._owed
        self._owed = max(min(taken, 0.0), -self._slack)
        self._total += max(taken, 0.0)
        return self._total


@final
class Cores:
    """/proc/stat: busy and stolen time of the cores we may use.

    Ticks are too coarse for less than 50 ms: in shorter steps the last value stays. Where very
    many cores make this file slow to write, it is read in the background. Processes that we
    started count as others.
    """

    shortest = 5 * TICK

    def __init__(self, host: Host) -> None:
        everything = host.text("/proc/stat")  # pid 1 sees no fewer cores than we do
        lines = everything.split("intr", 1)[0]
        self._file = host.open("/proc/stat", len(lines) + 64 * (lines.count("\n") + 1))
        names = [line.split(" ", 1)[0] for line in lines.split("\n")]
        cores = [f"cpu{core}" for core in sorted(host.cores)]
        self._lines = [(names.index(core), core.encode()) for core in cores]
        self._last_line = self._lines[-1][0]
        self._host, self._others = host, Others(len(host.cores))
        most = 100.0 * len(host.cores)
        self.factors = (
            Factor("cpu_other_percent", most, 100.0),
            Factor("cpu_own_percent", most, 100.0),
            Factor("steal_percent", most, 100.0),
        )

    def read(self) -> tuple[float, ...]:
        """Seconds."""
        busy = stolen = 0
        lines = self._file.read().split(b"\n", self._last_line + 1)
        for index, core in self._lines:
            ticks = lines[index].split()  # name user nice system idle iowait irq softirq steal
            if ticks[0] != core:
                raise ValueError(f"line {index} of /proc/stat is not {core!r}: a core went away")
            busy += int(ticks[1]) + int(ticks[2]) + int(ticks[3]) + int(ticks[6]) + int(ticks[7])
            stolen += int(ticks[8])
        own = self._host.process_seconds()
        return self._others.seconds(busy * TICK, own), own, stolen * TICK

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class Runnable:
    """/proc/loadavg: tasks that run or want to, now. Ours are among them."""

    shortest = 0.0
    factors = (Factor("runnable", 1e5),)

    def __init__(self, host: Host) -> None:
        self._file = host.open("/proc/loadavg", 128)

    def read(self) -> tuple[float, ...]:
        """Tasks: what is before the stroke in ``0.31 0.25 0.21 3/412 9031``."""
        return (float(self._file.read().split()[3].split(b"/")[0]),)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class Switches:
    """getrusage: how often our threads had to leave a core to others."""

    shortest = 0.001
    factors = (Factor("involuntary_switches_per_second", MOST_EVENTS, 1.0),)

    def __init__(self, host: Host) -> None:
        self._host = host

    def read(self) -> tuple[float, ...]:
        """Switches."""
        return (float(self._host.involuntary_switches()),)

    def close(self) -> None:
        """Nothing is open."""


@final
class Pressure:
    """Pressure stall information: time in which some task waited for a core.

    Of our cgroup where version 2 tells it, of the machine else.
    """

    shortest = 0.001
    factors = (Factor("cpu_pressure_percent", 100.0, 100.0),)

    def __init__(self, host: Host) -> None:
        try:
            self._file = host.open(cgroup.own_file(host, "", "cpu.pressure"))
        except OSError:
            self._file = host.open("/proc/pressure/cpu")

    def read(self) -> tuple[float, ...]:
        """Seconds, from ``some avg10=0.00 avg60=0.00 avg300=0.00 total=123456``."""
        return (float(self._file.read().split(b"total=", 1)[1].split()[0]) / 1e6,)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class Memory:
    """Memory of the machine and, where a cgroup limits it, of the cgroup; and our own share.

    In use is what could not be had at once: caches of files do not count (``MemAvailable``,
    ``inactive_file``). It changes slowly: read twice a second.
    """

    shortest = 0.5
    factors = (Factor("memory_percent"), Factor("memory_own_percent"))

    def __init__(self, host: Host) -> None:
        self._files: list[File] = []
        try:
            self._machine = self._keep(host.open("/proc/meminfo"))
            self._own = self._keep(host.open("/proc/self/statm", 128))
            self._group = cgroup.memory_limit(host)
            if self._group is not None:
                self._used = self._keep(host.open(self._group.used, 64))
                self._stat = self._keep(host.open(self._group.stat, 8192))
        except OSError:
            self.close()
            raise

    def _keep(self, file: File) -> File:
        self._files.append(file)
        return file

    def read(self) -> tuple[float, ...]:
        """Percents."""
        text = self._machine.read()
        total = _after(text, b"MemTotal:") * 1024
        percent = 100 * (1 - _after(text, b"MemAvailable:") * 1024 / total)
        if self._group is not None:
            limit = min(self._group.limit, total)
            used = int(self._used.read()) - _after(self._stat.read(), self._group.cache)
            total, percent = limit, max(percent, 100 * used / limit)
        resident = int(self._own.read().split()[1]) * PAGE
        return percent, 100 * resident / total

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _after(text: bytes, key: bytes) -> int:
    """The number behind `key`, a word at the beginning of a line."""
    at = 0 if text.startswith(key) else text.index(b"\n" + key) + 1
    return int(text[at + len(key) : at + len(key) + 32].split(maxsplit=1)[0])
