"""Sources on systems without ``/proc`` (macOS and Windows), read through psutil."""

from __future__ import annotations

import os
import sys
from typing import final

from lbbsp_core.resources.base import Factor
from lbbsp_core.resources.host import Host
from lbbsp_core.resources.linux import OtherCpuTime


@final
class PortableCpuTime:
    """CPU time on all cores of the machine; the affinity of this process is ignored."""

    min_interval_seconds = 0.001
    may_block = False

    def __init__(self, host: Host) -> None:
        import psutil

        self._psutil, self._host = psutil, host
        cores = psutil.cpu_count() or 1
        self._other = OtherCpuTime(cores)
        self.factors = (
            Factor("cpu_other_percent", 100.0 * cores, 100.0),
            Factor("cpu_own_percent", 100.0 * cores, 100.0),
        )

    def read(self) -> tuple[float, ...]:
        """Returns CPU seconds of other processes and of this process."""
        times, own = self._psutil.cpu_times(), self._host.process_seconds()
        return self._other.seconds(sum(times) - times.idle, own), own

    def close(self) -> None:
        """Does nothing: no file is open."""


@final
class LoadAverage:
    """Load average over one minute as a substitute for runnable tasks; emulated on Windows."""

    min_interval_seconds = 0.0
    may_block = False
    factors = (Factor("runnable", 1e5),)

    def __init__(self, host: Host) -> None:
        import psutil

        self._load = os.getloadavg if sys.platform != "win32" else psutil.getloadavg

    def read(self) -> tuple[float, ...]:
        """Returns the mean number of runnable tasks."""
        return (float(self._load()[0]),)

    def close(self) -> None:
        """Does nothing: no file is open."""


@final
class PortableMemoryUsage:
    """Memory in use on the machine, and resident memory of this process; read twice per second."""

    min_interval_seconds = 0.5
    may_block = False
    factors = (Factor("memory_percent"), Factor("memory_own_percent"))

    def __init__(self, host: Host) -> None:
        import psutil

        self._psutil, self._process = psutil, psutil.Process()

    def read(self) -> tuple[float, ...]:
        """Returns percent of memory in use, and percent used by this process."""
        memory = self._psutil.virtual_memory()
        own = 100.0 * self._process.memory_info().rss / memory.total
        return 100.0 * (1 - memory.available / memory.total), own

    def close(self) -> None:
        """Does nothing: no file is open."""
