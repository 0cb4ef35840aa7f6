"""The machine as the sources see it. Tests pass another one."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath


def _cores() -> frozenset[int]:
    """Cores that this process may use."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(os.getpid()))
    return frozenset(range(os.cpu_count() or 1))


def _involuntary_switches() -> int:
    """Involuntary context switches of all threads of this process, ended ones included."""
    if sys.platform == "win32":  # does not tell
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@dataclass(frozen=True)
class Host:
    """Where and how everything is read: the only place that knows the real machine.

    Args:
        root: Of the file system that holds ``proc`` and ``sys``.
        linux: Whether there is a ``proc`` to read; else psutil is asked.
        clock: Seconds, monotonic.
        process_seconds: CPU seconds of this process, all threads.
        involuntary_switches: Of this process, all threads.
        cores: Those this process may use.
        environ: Environment variables.
    """

    root: Path = Path("/")
    linux: bool = sys.platform == "linux"
    clock: Callable[[], float] = time.perf_counter
    process_seconds: Callable[[], float] = time.process_time
    involuntary_switches: Callable[[], int] = _involuntary_switches
    cores: frozenset[int] = field(default_factory=_cores)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def open(self, path: str | PurePath, size: int = 4096) -> File:
        """The pseudo-file at `path`, counted from `root`. Raises OSError."""
        return File(self.root / str(path).lstrip("/"), size)

    def text(self, path: str | PurePath) -> str:
        """All of a small file, read once. Raises OSError."""
        return (self.root / str(path).lstrip("/")).read_text(encoding="utf-8", errors="replace")


class File:
    """A pseudo-file that stays open and is read from its beginning each time: 1-10 microseconds.

    Args:
        path: Where it is.
        size: Bytes from the beginning that are of interest.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._size = size
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def read(self) -> bytes:
        """What it holds now. Raises OSError."""
        return os.pread(self._fd, self._size, 0)

    def close(self) -> None:
        """Close it; it cannot be read any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
