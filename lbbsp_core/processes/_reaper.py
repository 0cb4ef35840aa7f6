"""Program that cleans up after a killed parent: kills process groups, removes cgroups and folders.

The kernel kills the parent's children themselves (see ``_exec``), but not the processes that
these have started. The parent writes the names of process groups, cgroups and job folders to this
program's standard input, one per line. The input ends when the parent dies, even by SIGKILL; then
this program kills these groups and removes these cgroups and folders. A parent that exits normally
kills this program first.

Every process of a job has the job's folder in its environment, by which it is found even in a
session of its own.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress

JOB = "LBBSP_JOB"
"""Environment variable with the folder of a job, in all of its processes."""
PROC = "/proc"


def main() -> None:
    """Reads until the parent has died, then kills every process group and removes every cgroup."""
    lines = [line.split(maxsplit=1) for line in sys.stdin.read().splitlines()]
    for kind, name in lines:  # all groups first: cgroups take time
        if kind == "group":
            with suppress(OSError):  # it has ended already
                os.killpg(int(name), signal.SIGKILL)
    for kind, name in lines:
        if kind == "cgroup":
            remove_cgroup(name)
        elif kind == "job":
            for pid in processes_of(name):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(name, ignore_errors=True)


def processes_of(folder: str) -> list[int]:
    """Returns the processes of a job; none where there is no ``/proc``, and no zombies."""
    entry, process_ids = os.fsencode(f"{JOB}={folder}"), []
    for name in filter(str.isdigit, os.listdir(PROC) if os.path.isdir(PROC) else ()):
        with suppress(OSError):  # it has ended, belongs to another user, or is the kernel's
            if entry in _environment(f"{PROC}/{name}").split(b"\0"):
                process_ids.append(int(name))
    return process_ids


def _environment(process: str) -> bytes:
    """Returns a process's environment; one that is just being executed gets a second to have it."""
    end = "0"
    for _ in range(100):
        with open(f"{process}/environ", "rb") as stream:
            if environment := stream.read():
                return environment
        before, end = end, _environment_end(process)
        if end == "0":
            time.sleep(0.01)
        elif end == before:  # it has none: the same program was there before and after it was read
            break
    return b""


def _environment_end(process: str) -> str:
    """Returns the address at which its environment ends: 0 while the program is being executed."""
    os.readlink(f"{process}/exe")  # OSError: it has no program, as a zombie or a kernel thread
    with open(f"{process}/stat", encoding="utf-8", errors="replace") as stream:
        return stream.read().rpartition(")")[2].split()[48]  # field 51 of proc(5)


def remove_cgroup(cgroup: str) -> None:
    """Kills the processes of a cgroup, then removes it as soon as the kernel permits."""
    for _ in range(100):
        with suppress(OSError):
            with open(os.path.join(cgroup, "cgroup.procs"), encoding="ascii") as stream:
                for pid in map(int, stream.read().split()):
                    if pid > 0:  # 0 stands for a process of another PID namespace
                        os.kill(pid, signal.SIGKILL)
            os.rmdir(cgroup)
        if not os.path.exists(cgroup):
            return
        time.sleep(0.02)


if __name__ == "__main__":
    main()
