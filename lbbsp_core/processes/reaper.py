"""Handle of the process that cleans up when this process is killed (see ``_reaper``)."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import Literal

from lbbsp_core.processes import _reaper


class Reaper:
    """Helper process that kills processes and removes cgroups if this process is killed.

    It reads their names from a pipe and acts when the pipe closes.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _reaper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that a Ctrl-C at the terminal does not end it
            text=True,
        )

    def watch(self, kind: Literal["group", "cgroup", "job"], name: object) -> None:
        """Adds what ends with this process: a process group, a cgroup, or the folder of a job."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the helper was killed: the job continues without it
            self._process.stdin.write(f"{kind} {name}\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Kills the helper, so that it does not act on the names that it has received."""
        self._process.kill()
        self._process.communicate()
