"""Program that cleans up after a killed parent: kills process groups and removes cgroups.

The kernel kills the parent's children themselves (see ``_exec``), but not the processes that
these have started. The parent writes the names of process groups and cgroups to this program's
standard input, one per line. The input ends when the parent dies, even by SIGKILL; then this
program kills these groups and removes these cgroups. A parent that exits normally kills this
program first.
"""

import os
import signal
import sys
import time


def main() -> None:
    """Reads until the parent has died, then kills every process group and removes every cgroup."""
    lines = [line.split(maxsplit=1) for line in sys.stdin.read().splitlines()]
    for kind, name in lines:
        if kind == "group":
            kill_group(int(name))
    for kind, name in lines:
        if kind == "cgroup":
            remove_cgroup(name)


def kill_group(group: int) -> None:
    """Kills a process group that may have ended already."""
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        return


def remove_cgroup(cgroup: str) -> None:
    """Kills the processes of a cgroup, then removes it as soon as the kernel permits."""
    for _ in range(100):
        if try_remove_cgroup(cgroup):
            return
        time.sleep(0.02)


def try_remove_cgroup(cgroup: str) -> bool:
    """Returns whether the cgroup is removed after one attempt."""
    try:
        with open(os.path.join(cgroup, "cgroup.procs"), encoding="ascii") as stream:
            for pid in map(int, stream.read().split()):
                if pid > 0:  # 0 stands for a process of another PID namespace
                    os.kill(pid, signal.SIGKILL)
        os.rmdir(cgroup)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
