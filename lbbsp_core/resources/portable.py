"""What psutil tells where there is no /proc: macOS and Windows."""

from __future__ import annotations

import os
import sys
from typing import final

from lbbsp_core.resources.base import Factor
from lbbsp_core.resources.host import Host
from lbbsp_core.resources.linux import TICK, Others


@final
class PortableCores:
    """CPU time of all cores: which ones a process may use matters on Linux only here."""

    shortest = 5 * TICK

    def __init__(self, host: Host) -> None:
        import psutil

        self._psutil, self._host = psutil, host
        cores = psutil.cpu_count() or 1
        self._others = Others(cores)
        self.factors = (
            Factor("cpu_other_percent", 100.0 * cores, 100.0),
            Factor("cpu_own_percent", 100.0 * cores, 100.0),
        )

    def read(self) -> tuple[float, ...]:
        """Seconds."""
        times, own = self._psutil.cpu_times(), self._host.process_seconds()
        return self._others.seconds(sum(times) - times.idle, own), own

    def close(self) -> None:
        """Nothing is open."""


@final
class PortableQueue:
    """The load average of a minute stands for the tasks that run; Windows has psutil's own."""

    shortest = 0.0
    factors = (Factor("runnable", 1e5),)

    def __init__(self, host: Host) -> None:
        import psutil

        self._load = os.getloadavg if sys.platform != "win32" else psutil.getloadavg

    def read(self) -> tuple[float, ...]:
        """Tasks."""
        return (float(self._load()[0]),)

    def close(self) -> None:
        """Nothing is open."""


@final
class PortableMemory:
    """Memory of the machine, and our own resident one, twice a second."""

    shortest = 0.5
    factors = (Factor("memory_percent"), Factor("memory_own_percent"))

    def __init__(self, host: Host) -> None:
        import psutil

        self._psutil, self._process = psutil, psutil.Process()

    def read(self) -> tuple[float, ...]:
        """Percents."""
        memory = self._psutil.virtual_memory()
        own = 100.0 * self._process.memory_info().rss / memory.total
        return 100.0 * (1 - memory.available / memory.total), own

    def close(self) -> None:
        """Nothing is open."""
