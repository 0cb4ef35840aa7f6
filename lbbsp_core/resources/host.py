"""Access to the machine: file system, clocks, psutil and environment. Tests pass a fake host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any


def _available_cores() -> frozenset[int]:
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(os.getpid()))
    return frozenset(range(os.cpu_count() or 1))


def _involuntary_switches() -> int:
    """Counts involuntary context switches of all threads of this process, ended ones included."""
    if sys.platform == "win32":  # not available on Windows
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


# psutil is imported when a source asks for it: most users of this package read no source.


def _memory() -> tuple[int, int]:
    import psutil

    found = psutil.virtual_memory()
    return found.total, found.available


def _resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _core_times() -> Sequence[Any]:
    import psutil

    return list(psutil.cpu_times(percpu=True))


@dataclass(frozen=True)
class Host:
    """Machine that the sources read; the defaults are the real one."""

    root: Path = Path("/")  # of the file system that contains ``proc`` and ``sys``
    clock: Callable[[], float] = time.perf_counter
    process_seconds: Callable[[], float] = time.process_time  # CPU seconds, all threads
    involuntary_switches: Callable[[], int] = _involuntary_switches  # of all our threads
    memory: Callable[[], tuple[int, int]] = _memory  # bytes: all, available
    resident: Callable[[], int] = _resident  # bytes of this process
    core_times: Callable[[], Sequence[Any]] = _core_times  # seconds of each core by their use
    cores: frozenset[int] = field(default_factory=_available_cores)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def resolve(self, path: str | PurePath) -> Path:
        """Returns the absolute `path` as a path below `root`."""
        return self.root / str(path).lstrip("/")

    def open(self, path: str | PurePath, size: int = 4096) -> PseudoFile:
        """Opens a pseudo-file for repeated reading."""
        return PseudoFile(self.resolve(path), size)

    def read_text(self, path: str | PurePath) -> str:
        """Returns the contents of a small file."""
        return self.resolve(path).read_text(encoding="utf-8", errors="replace")


class PseudoFile:
    """File in ``/proc`` or ``/sys``, kept open and read from its start: 1 to 10 microseconds."""

    def __init__(self, path: Path, size: int) -> None:
        self._size = size
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def read(self) -> bytes:
        """Returns the current contents, at most `size` bytes. Raises OSError on failure."""
        return os.pread(self._fd, self._size, 0)

    def close(self) -> None:
        """Closes the file. Further calls have no effect."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
