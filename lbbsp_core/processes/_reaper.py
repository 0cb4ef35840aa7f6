"""Ends what a killed launcher leaves behind: its workers' children, and its cgroups.

The kernel ends the workers themselves (see ``_exec``), but not the processes that they started.
Standard input is a pipe from the launcher: it names process groups and cgroups, one a line, and
ends with the launcher, even when that is killed. A launcher that ends well ends this one first.
"""

import os
import signal
import sys
import time


def main() -> None:
    """Read until the launcher is gone, then end every process group and remove every cgroup."""
    lines = [line.split(maxsplit=1) for line in sys.stdin.read().splitlines()]
    for kind, name in lines:
        if kind == "group":
            kill_group(int(name))
    for kind, name in lines:
        if kind == "cgroup":
            remove(name)


def kill_group(group: int) -> None:
    """Kill a process group that may be gone already."""
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        return


def remove(cgroup: str) -> None:
    """Kill what has left its process group, and remove the cgroup once the kernel lets go of it."""
    for _ in range(100):
        if removed(cgroup):
            return
        time.sleep(0.02)


def removed(cgroup: str) -> bool:
    """Try it once. Returns whether the cgroup is gone."""
    try:
        with open(os.path.join(cgroup, "cgroup.procs"), encoding="ascii") as stream:
            for pid in map(int, stream.read().split()):
                if pid > 0:  # 0 stands for a process that is out of our sight
                    os.kill(pid, signal.SIGKILL)
        os.rmdir(cgroup)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
