"""Run in a worker's process before the worker itself: tie it to the launcher, put it in its cgroup.

This is a program of its own, started by its path, and not a ``preexec_fn``: that would run Python
between fork and exec in a process whose other threads (and the locks they held) are gone.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Replace this process by a command: ``launcher_pid cgroup_procs_or_empty command...``."""
    launcher, procs, *command = arguments
    die_with(int(launcher))
    if procs:
        with open(procs, "w", encoding="ascii") as stream:
            stream.write(str(os.getpid()))
    os.execv(command[0], command)


def die_with(launcher: int) -> None:
    """Have the kernel kill this process when the launcher dies, by whatever signal."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:  # it died before we asked
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
