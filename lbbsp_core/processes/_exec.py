"""Program that ties a child process to its parent, places it and runs its command.

The process is placed in a cgroup and on some of the cores.

It is started by its path and replaces itself by the command, so that the process ID stays the
same. A ``preexec_fn`` would instead run Python between fork and exec, in a copy of the parent
whose other threads are gone while the locks that they held stay locked.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Replaces this process by a command: ``parent_pid cgroups cores command...``.

    Directories of cgroups are separated by line breaks, cores by commas; both may be empty.
    """
    parent, cgroups, cores, *command = arguments
    if sys.platform == "linux":  # the kernel kills this process when its parent dies
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != int(parent):  # the parent died before the request took effect
            sys.exit(1)
    for cgroup in cgroups.splitlines():
        with open(os.path.join(cgroup, "cgroup.procs"), "w", encoding="ascii") as stream:
            stream.write(str(os.getpid()))
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
