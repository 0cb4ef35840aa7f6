"""Access to the machine: file system, clocks, psutil and environment. Tests pass a fake host."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any


def _available_cores() -> frozenset[int]:
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(os.getpid()))
    return frozenset(range(os.cpu_count() or 1))


def _psutil() -> Any:
    """Imports psutil when a source asks for it: most users of this package read no source."""
    import psutil

    return psutil


@dataclass(frozen=True)
class Host:
    """Machine that the sources read; the defaults are the real one."""

    root: Path = Path("/")  # of the file system that contains ``proc`` and ``sys``
    clock: Callable[[], float] = time.perf_counter
    process_seconds: Callable[[], float] = time.process_time  # CPU seconds, all threads
    memory: Callable[[], tuple[int, int]] = lambda: _psutil().virtual_memory()[:2]  # all, available
    # Seconds of each core by their use.
    core_times: Callable[[], Sequence[Any]] = lambda: _psutil().cpu_times(percpu=True)
    load: Callable[[], float] = lambda: _psutil().getloadavg()[0]  # of the last minute
    cores: frozenset[int] = field(default_factory=_available_cores)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    gpu: int = 0  # index of the GPU of this process among those that it sees
    opened: ExitStack = field(default_factory=ExitStack)  # what the sources have opened

    def resolve(self, path: str | PurePath) -> Path:
        """Returns the absolute `path` as a path below `root`."""
        return self.root / str(path).lstrip("/")

    def open(self, path: str | PurePath, size: int = 4096) -> Callable[[], bytes]:
        """Returns a function that reads a pseudo-file, in 1 to 10 microseconds.

        The file is kept open, and read from its start. Contents beyond `size` bytes are cut off.
        """
        descriptor = os.open(self.resolve(path), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self.opened.callback(os.close, descriptor)
        return lambda: os.pread(descriptor, size, 0)

    def read_text(self, path: str | PurePath) -> str:
        """Returns the contents of a small file."""
        return self.resolve(path).read_text(encoding="utf-8", errors="replace")
