"""The process that tidies up when the launcher is killed (see ``_reaper``)."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from lbbsp_core.processes import _reaper


class Guard:
    """A small process at the other end of a pipe; it acts when the pipe ends with us."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _reaper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is not for it
            text=True,
        )

    def watch_group(self, group: int) -> None:
        """Kill this process group if we are killed."""
        self._tell(f"group {group}")

    def watch_cgroup(self, path: Path) -> None:
        """Remove this cgroup if we are killed."""
        self._tell(f"cgroup {path}")

    def close(self) -> None:
        """End it: there is nothing left to guard. Killed, it cannot act on what it was told."""
        self._process.kill()
        self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed it: the job can do without
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
