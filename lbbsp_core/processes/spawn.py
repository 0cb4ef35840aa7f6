"""Starts a child process in its own session, and signals, observes and names its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lbbsp_core.processes import _exec


def exec_command(
    command: Sequence[str], cgroups: Sequence[Path] = (), cores: Collection[int] = ()
) -> list[str]:
    """Returns the command line that runs `command` through ``_exec``."""
    python = [sys.executable, "-I", "-S", _exec.__file__, str(os.getpid())]
    return [*python, "\n".join(map(str, cgroups)), ",".join(map(str, cores)), *command]


def spawn_python(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cgroups: Sequence[Path] = (),
    pass_fds: Collection[int] = (),
    cores: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts this Python as the leader of a new session, which is also a new process group.

    Standard input is empty; standard output and error share one pipe, unbuffered by the child.
    """
    return subprocess.Popen(
        exec_command([sys.executable, "-u", *arguments], cgroups, cores),
        env=None if environment is None else dict(environment),
        pass_fds=tuple(pass_fds),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def signal_group(group: int, signum: signal.Signals) -> None:
    """Signals a process group that may have ended already."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def wait_unreaped(pid: int, *, block: bool = True) -> int | None:
    """Waits for a child's end without reaping it, so that its process ID is not reused yet.

    Returns the exit status, or minus the signal's number; None while the child still runs. Raises
    ChildProcessError if the kernel has reaped it, because this process ignores SIGCHLD.
    """
    options = os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG)
    end = os.waitid(os.P_PID, pid, options)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def signal_name(signum: int) -> str:
    """Returns the name of a signal, such as "SIGKILL"; real-time signals only have a number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
