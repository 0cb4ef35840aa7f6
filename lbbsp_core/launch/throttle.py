"""Emulated slowness: limits each worker to its share of a core, by quotas or by a duty cycle."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, final, get_args

from lbbsp_core.launch.cpu_shares import PERIOD_US, Schedule, quota_us
from lbbsp_core.processes import _reaper
from lbbsp_core.processes.child import exec_command, signal_group
from lbbsp_core.resources.cgroup import cpu_quotas, hierarchies
from lbbsp_core.resources.host import Host
from lbbsp_core.validate import require_known

Emulation: TypeAlias = Literal["auto", "cgroup", "duty-cycle"]

PREFIX: Final = "lbbsp"  # of the names of cgroups

CYCLE_SECONDS: Final = 0.02
MIN_PAUSE_CYCLES: Final = 0.01  # bounds the cost of an edge that rounding puts just ahead


class Throttle:
    """Slows workers down; the launcher calls its methods in the order below. This one does not."""

    def cgroups(self) -> Sequence[Path]:
        """Returns a cgroup of each worker, of each hierarchy in turn; empty if there are none."""
        return ()

    def attach(self, rank: int, pid: int) -> None:
        """Adds worker ``rank``, which leads process group ``pid``."""

    def apply(self, shares: Sequence[float]) -> None:
        """Limits the workers to these shares of a core from now on."""

    def release(self, rank: int) -> None:
        """Lifts the limit of a worker for good, so that it can exit quickly."""

    def close(self) -> None:
        """Releases all resources, after the workers have ended."""


def create_throttle(
    plan: Schedule | None, emulation: Emulation, notify: Callable[[str], None], *, contended: bool
) -> Throttle:
    """Creates CPU quotas where this process may set them, and a duty cycle elsewhere."""
    if plan is None:
        return Throttle()
    require_known("emulation", emulation, get_args(Emulation))
    shares = plan.stages[0].shares
    quotas = None if emulation == "duty-cycle" else open_quotas(shares, plan.period_us)
    if quotas is not None:
        if plan.period_us > PERIOD_US:  # a long period affects single training steps
            notify(
                f"the quota period is {plan.period_us / 1000:g} ms, "
                "because the slowest worker's quota must be at least 1 ms"
            )
        return quotas
    if emulation == "cgroup":
        raise ValueError(
            "emulation must not be 'cgroup' where the cpu controller is not writable: "
            "run as root, have a cgroup delegated to you, or use 'duty-cycle'"
        )
    if contended:
        raise ValueError(
            "contention needs CPU quotas where speeds are emulated, or workers outnumber the "
            "cores, and the cpu controller is not writable or not to be used: run as root, have a "
            "cgroup delegated to you, or omit speeds and start at most one worker per core"
        )
    notify(
        "emulating speeds by stopping and continuing the workers every "
        f"{CYCLE_SECONDS * 1000:g} ms, which is coarser than CPU quotas"
        + ("" if emulation == "duty-cycle" else ", because cgroups are not writable here")
    )
    return DutyCycle(shares).start()


def available_cores() -> float:
    """Returns the number of cores that this process may use, by its affinity and CPU quotas."""
    return min([float(len(os.sched_getaffinity(0))), *cpu_quotas(Host())])


# Quotas


@final
class CpuQuotas(Throttle):
    """Limits each worker by the CPU quota of its own cgroup, of version 1 or 2.

    The cgroups are named after this process and a random token: no two launches share any. They
    are below the first of the parents; a second one, of another hierarchy, counts CPU time.
    """

    def __init__(self, version: int, parents: Sequence[Path], workers: int, period_us: int) -> None:
        token = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
        self._groups = [parent / f"{token}-{rank}" for parent in parents for rank in range(workers)]
        self._version, self._period_us = version, period_us
        self._released: set[int] = set()

    def create(self, shares: Sequence[float]) -> None:
        """Creates the cgroups with their first quotas."""
        for group in self._groups:
            group.mkdir()
        self.apply(shares)

    def _write(self, rank: int, quota: int | None) -> None:
        """Sets the microseconds of CPU time per period; None lifts the limit."""
        group, period = self._groups[rank], self._period_us
        if self._version == 2:
            (group / "cpu.max").write_text(f"{quota or 'max'} {period}", encoding="ascii")
        else:  # the period first: the kernel checks every quota against it
            (group / "cpu.cfs_period_us").write_text(str(period), encoding="ascii")
            (group / "cpu.cfs_quota_us").write_text(str(quota or -1), encoding="ascii")

    # A worker enters its cgroup before it starts (see ``_exec``): there is nothing to attach.

    def cgroups(self) -> Sequence[Path]:
        """Returns the cgroup of each worker with its quota, then those that count CPU time."""
        return self._groups

    def apply(self, shares: Sequence[float]) -> None:
        """Changes the quotas of the workers that have not been released."""
        for rank, share in enumerate(shares):
            if rank not in self._released:
                self._write(rank, quota_us(share, self._period_us))

    def release(self, rank: int) -> None:
        """Lifts the quota of one worker."""
        self._released.add(rank)
        self._write(rank, None)

    def close(self) -> None:
        """Removes the cgroups, and kills the processes left in them."""
        for group in self._groups:
            _reaper.remove_cgroup(str(group))


def open_quotas(shares: Sequence[float], period_us: int) -> CpuQuotas | None:
    """Creates one cgroup per worker under the nearest parent that permits it; None if none does."""
    for version, base in parent_cgroups():
        parents = [base, *(_accounting(base) if version == 1 else ())]
        for parent in parents:
            remove_leftovers(parent)
        quotas = CpuQuotas(version, parents, len(shares), period_us)
        with suppress(OSError):
            quotas.create(shares)
            if _can_enter(quotas.cgroups()[:: len(shares)]):
                return quotas
        quotas.close()
    return None


def parent_cgroups() -> Iterator[tuple[int, Path]]:
    """Yields version and directory of possible parents of new cgroups, the nearest first."""
    for own_group, *ancestors in hierarchies(Host(), "cpu"):
        if own_group.version == 1:
            yield 1, Path(own_group.path)
        else:
            paths = (Path(group.path) for group in (own_group, *ancestors))
            yield from ((2, path) for path in paths if _enable_cpu_quotas(path))


def _enable_cpu_quotas(group: Path) -> bool:
    """Returns whether the children of a version 2 cgroup have CPU quotas, after enabling them."""
    control = group / "cgroup.subtree_control"
    try:
        if "cpu" not in control.read_text(encoding="ascii").split():
            control.write_text("+cpu", encoding="ascii")
    except OSError:  # no such controller, not writable, or the cgroup contains processes
        return False
    return True


def _accounting(quotas: Path) -> list[Path]:
    """Returns where version 1 counts CPU time, if that is another hierarchy than the quotas'.

    Without it a worker could not tell its own CPU time from that of its neighbours in the group.
    """
    if (quotas / "cpuacct.usage").exists():
        return []
    owns = (groups[0] for groups in hierarchies(Host(), "cpuacct"))
    return [Path(group.path) for group in owns if group.version == 1][:1]


def _can_enter(groups: Sequence[Path]) -> bool:
    """Returns whether a child may enter cgroups, which needs other rights than creating them."""
    command = exec_command([sys.executable, "-I", "-S", "-c", ""], groups)
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def remove_leftovers(base: Path) -> None:
    """Removes the empty cgroups of launches that were killed together with their reaper.

    Populated cgroups are kept: they may belong to a container with its own PID namespace, where
    the process ID in the name means another process.
    """
    for group in base.glob(f"{PREFIX}-*-*-*"):
        pid = group.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with suppress(OSError):
                group.rmdir()


# Duty cycle


class Window(NamedTuple):
    """Part of the cycle in which a worker runs: from ``start`` on, for ``share`` of the cycle."""

    start: float
    share: float

    def contains(self, phase: float) -> bool:
        """Returns whether the worker runs at this phase of the cycle, in [0, 1)."""
        return (phase - self.start) % 1.0 < self.share

    def next_edge(self, phase: float) -> float:
        """Returns the fraction of a cycle until the worker is next stopped or continued."""
        since = (phase - self.start) % 1.0
        return (self.share if since < self.share else 1.0) - since


def windows(shares: Sequence[float]) -> tuple[Window, ...]:
    """Places the windows end to end around the cycle (McNaughton's wrap-around rule).

    At most ``ceil(sum(shares))`` workers run at once, so never more than there are cores.
    """
    starts = accumulate(shares, initial=0.0)
    return tuple(Window(start % 1.0, share) for start, share in zip(starts, shares, strict=False))


@dataclass
class _Worker:
    """Worker in the cycle."""

    group: int  # of processes
    runs: bool = True  # as opposed to being stopped
    debt: float = 0.0  # running time that it has missed, in cycles; negative if it ran too long


@final
class DutyCycle(Throttle):
    """Lets worker i run for ``share_i`` of the time, by SIGSTOP and SIGCONT to its group.

    On a busy machine a signal is sent late; the difference between a worker's running time and its
    share is added to its next window. A worker with one busy thread gets its share of a core; one
    with more threads gets more.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = tuple(shares)
        self._windows = windows(shares)
        self._workers: dict[int, _Worker] = {}
        self._clock: float | None = None  # at the last switch, in cycles
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="duty-cycle", daemon=True)

    def start(self) -> DutyCycle:
        """Starts the thread that stops and continues the workers."""
        self._thread.start()
        return self

    def attach(self, rank: int, pid: int) -> None:
        """Adds a worker to the cycle."""
        with self._lock:
            self._workers[rank] = _Worker(pid)

    def apply(self, shares: Sequence[float]) -> None:
        """Changes the shares, with effect within a cycle."""
        with self._lock:
            self._shares = tuple(shares)
            self._windows = windows(shares)
            for worker in self._workers.values():
                worker.debt = 0.0

    def release(self, rank: int) -> None:
        """Removes a worker from the cycle and continues it."""
        with self._lock:
            worker = self._workers.pop(rank, None)
        if worker is not None:
            signal_group(worker.group, signal.SIGCONT)

    def close(self) -> None:
        """Ends the cycle and continues every worker."""
        self._closed.set()
        self._thread.join()
        for rank in list(self._workers):
            self.release(rank)

    def _run(self) -> None:
        pause = 0.0
        while not self._closed.wait(pause * CYCLE_SECONDS):
            pause = self.switch(time.monotonic() / CYCLE_SECONDS)

    def switch(self, clock: float) -> float:
        """Stops the workers whose window has ended and continues those whose window has started.

        Returns the number of cycles until the next call is due.
        """
        with self._lock:
            last, self._clock = clock if self._clock is None else self._clock, clock
            for rank, worker in self._workers.items():
                debt = worker.debt + (clock - last) * (self._shares[rank] - worker.runs)
                worker.debt = min(max(debt, -1.0), 1.0)  # a long stall is not compensated
            if clock // 1.0 > last // 1.0:
                debts = {rank: worker.debt for rank, worker in self._workers.items()}
                due = (share + debts.get(rank, 0.0) for rank, share in enumerate(self._shares))
                self._windows = windows([min(max(share, 0.0), 1.0) for share in due])
            phase = clock % 1.0
            for rank, worker in self._workers.items():
                if self._windows[rank].contains(phase) != worker.runs:
                    worker.runs = not worker.runs
                    signal_group(worker.group, signal.SIGCONT if worker.runs else signal.SIGSTOP)
            edges = [self._windows[rank].next_edge(phase) for rank in self._workers]
            return max(min([*edges, 1.0 - phase]), MIN_PAUSE_CYCLES)
