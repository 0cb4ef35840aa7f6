"""CPU quotas by cgroups of version 1 or 2, where this process may create them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, final

from lbbsp_core.launch.cpu_shares import quota_us
from lbbsp_core.processes import _reaper
from lbbsp_core.processes.spawn import exec_command

PREFIX: Final = "lbbsp"


class Controller(NamedTuple):
    """Mounted controller.

    Args:
        version: Version of the cgroup interface, 1 or 2.
        mount: Mount point.
        own: Directory of this process's cgroup, the mount point or below.
    """

    version: int
    mount: Path
    own: Path


def controllers(mounts: str, memberships: str, name: str = "cpu") -> list[Controller]:
    """Finds the mounts of a controller, with those of version 2, which may have any."""
    found = []
    for line in mounts.splitlines():
        _, mount_point, kind, options, *_ = line.split()
        mount = Path(mount_point.replace("\\040", " "))
        if kind == "cgroup" and name in options.split(","):
            found.append(Controller(1, mount, _own_cgroup(mount, memberships, name)))
        elif kind == "cgroup2":
            found.append(Controller(2, mount, _own_cgroup(mount, memberships, "")))
    return found


def _own_cgroup(mount: Path, memberships: str, controller: str) -> Path:
    """Returns this process's cgroup below a mount point.

    In a container (Docker) the path may lie outside the mount; the mount point is then used.
    """
    for line in memberships.splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(",") and (mount / path.lstrip("/")).is_dir():
            return mount / path.lstrip("/")
    return mount


def _controllers_here(name: str = "cpu") -> list[Controller]:
    try:
        return controllers(
            Path("/proc/mounts").read_text(encoding="utf-8"),
            Path("/proc/self/cgroup").read_text(encoding="utf-8"),
            name,
        )
    except OSError:  # not Linux
        return []


def own_quotas() -> list[float]:
    """Returns the quotas, in cores, of this process's cgroup and its ancestors."""
    return [
        quota
        for controller in _controllers_here()
        for group in _self_and_ancestors(controller)
        for quota in [_quota(group)]
        if quota is not None
    ]


def _self_and_ancestors(controller: Controller) -> Iterator[Path]:
    """Yields this process's cgroup, then its ancestors, up to the mount point."""
    for group in (controller.own, *controller.own.parents):
        yield group
        if group == controller.mount:
            return


def _quota(group: Path) -> float | None:
    """Returns the quota of a cgroup in cores, or None if it has none."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


class CgroupThrottle(ABC):
    """Limits each worker by the CPU quota of its own cgroup.

    The cgroups are named after this process and a random token: no two launches share any.
    `accounting` is a parent cgroup of another hierarchy, which counts CPU time; None if the quotas'
    own does.
    """

    def __init__(
        self, base: Path, workers: int, period_us: int, accounting: Path | None = None
    ) -> None:
        token = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
        self._groups = [base / f"{token}-{rank}" for rank in range(workers)]
        self._accounts = [accounting / group.name for group in self._groups if accounting]
        self._period_us = period_us
        self._released: set[int] = set()

    def create(self, shares: Sequence[float]) -> None:
        """Creates the cgroups with their first quotas."""
        for group, share in zip(self._groups, shares, strict=True):
            group.mkdir()
            self.write_quota(group, quota_us(share, self._period_us), self._period_us)
        for account in self._accounts:
            account.mkdir()

    @abstractmethod
    def write_quota(self, group: Path, quota: int | None, period: int) -> None:
        """Sets the microseconds of CPU time per period; None lifts the limit."""

    def cgroups(self) -> Sequence[Path]:
        """Returns the cgroup of each worker with its quota, then those that count CPU time."""
        return [*self._groups, *self._accounts]

    def cgroups_of(self, rank: int) -> Sequence[Path]:
        """Returns the cgroups that a worker enters."""
        return [self._groups[rank], *self._accounts[rank : rank + 1]]

    def attach(self, rank: int, pid: int) -> None:  # noqa: B027
        """Does nothing: the worker enters its cgroup before it starts (see ``_exec``)."""

    def apply(self, shares: Sequence[float]) -> None:
        """Changes the quotas of the workers that have not been released."""
        for rank, (group, share) in enumerate(zip(self._groups, shares, strict=True)):
            if rank not in self._released:
                self.write_quota(group, quota_us(share, self._period_us), self._period_us)

    def release(self, rank: int) -> None:
        """Lifts the quota of one worker."""
        self._released.add(rank)
        self.write_quota(self._groups[rank], None, self._period_us)

    def close(self) -> None:
        """Removes the cgroups, and kills the processes left in them."""
        for group in self.cgroups():
            _reaper.remove_cgroup(str(group))


@final
class CgroupV1(CgroupThrottle):
    """Writes quotas to ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us``."""

    def write_quota(self, group: Path, quota: int | None, period: int) -> None:
        """Writes the period first, because the kernel checks every quota against it."""
        (group / "cpu.cfs_period_us").write_text(str(period), encoding="ascii")
        (group / "cpu.cfs_quota_us").write_text(str(quota or -1), encoding="ascii")


@final
class CgroupV2(CgroupThrottle):
    """Writes quotas to ``cpu.max``."""

    def write_quota(self, group: Path, quota: int | None, period: int) -> None:
        """Writes quota and period in one line."""
        (group / "cpu.max").write_text(f"{quota or 'max'} {period}", encoding="ascii")


def open_groups(shares: Sequence[float], period_us: int) -> CgroupThrottle | None:
    """Creates one cgroup per worker under the nearest parent that permits it; None if none does."""
    for version, base in _parent_cgroups():
        accounting = _accounting(base) if version == 1 else None
        for parent in filter(None, (base, accounting)):
            remove_leftovers(parent)
        kind = CgroupV1 if version == 1 else CgroupV2
        groups = kind(base, len(shares), period_us, accounting)
        try:
            groups.create(shares)
            if _can_enter(groups.cgroups_of(0)):
                return groups
        except OSError:
            pass
        groups.close()
    return None


def _parent_cgroups() -> Iterator[tuple[int, Path]]:
    """Yields version and directory of possible parents of new cgroups, the nearest first."""
    for controller in _controllers_here():
        if controller.version == 1:
            yield 1, controller.own
        else:
            groups = filter(_enable_cpu_quotas, _self_and_ancestors(controller))
            yield from ((2, group) for group in groups)


def _enable_cpu_quotas(group: Path) -> bool:
    """Returns whether the children of a version 2 cgroup have CPU quotas, after enabling them."""
    control = group / "cgroup.subtree_control"
    try:
        if "cpu" not in control.read_text(encoding="ascii").split():
            control.write_text("+cpu", encoding="ascii")
    except OSError:  # no such controller, not writable, or the cgroup contains processes
        return False
    return True


def _accounting(quotas: Path) -> Path | None:
    """Returns where version 1 counts CPU time, if that is another hierarchy than the quotas'.

    Without it a worker could not tell its own CPU time from that of its neighbours in the group.
    """
    if (quotas / "cpuacct.usage").exists():
        return None
    return next((each.own for each in _controllers_here("cpuacct") if each.version == 1), None)


def _can_enter(groups: Sequence[Path]) -> bool:
    """Returns whether a child may enter cgroups, which needs other rights than creating them."""
    probe = subprocess.run(
        exec_command([sys.executable, "-I", "-S", "-c", ""], groups),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return probe.returncode == 0


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
