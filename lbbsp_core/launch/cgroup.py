"""CPU-time quotas by cgroups, version 1 or 2, wherever the kernel lets us set them."""

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
from lbbsp_core.processes import _exec, _reaper

PREFIX: Final = "lbbsp"


class Controller(NamedTuple):
    """Where the cpu controller is mounted, and our own place in it."""

    version: int
    mount: Path
    own: Path


def controllers(mounts: str, memberships: str) -> list[Controller]:
    """Find the cpu controller in the texts of /proc/mounts and /proc/self/cgroup."""
    found = []
    for line in mounts.splitlines():
        _, where, kind, options, *_ = line.split()
        mount = Path(where.replace("\\040", " "))
        if kind == "cgroup" and "cpu" in options.split(","):
            found.append(Controller(1, mount, _place(mount, memberships, "cpu")))
        elif kind == "cgroup2":
            found.append(Controller(2, mount, _place(mount, memberships, "")))
    return found


def _place(mount: Path, memberships: str, controller: str) -> Path:
    """Our own cgroup below a mount; the mount itself where our path is out of sight (Docker)."""
    for line in memberships.splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(",") and (mount / path.lstrip("/")).is_dir():
            return mount / path.lstrip("/")
    return mount


def _controllers_here() -> list[Controller]:
    try:
        return controllers(
            Path("/proc/mounts").read_text(encoding="utf-8"),
            Path("/proc/self/cgroup").read_text(encoding="utf-8"),
        )
    except OSError:  # not Linux
        return []


def own_quotas() -> list[float]:
    """The quotas, in cores, that we are under ourselves: our cgroup's and its ancestors'."""
    return [
        quota
        for controller in _controllers_here()
        for group in _upwards(controller)
        for quota in [_quota(group)]
        if quota is not None
    ]


def _upwards(controller: Controller) -> Iterator[Path]:
    """Our own cgroup, then its ancestors, up to the mount."""
    for group in (controller.own, *controller.own.parents):
        yield group
        if group == controller.mount:
            return


def _quota(group: Path) -> float | None:
    """The quota of one cgroup in cores, None where it has none."""
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
    """One cgroup per worker, named after our process, so that no two launches share any."""

    def __init__(self, base: Path, workers: int, period_us: int) -> None:
        token = f"{PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
        self._groups = [base / f"{token}-{rank}" for rank in range(workers)]
        self._period_us = period_us
        self._released: set[int] = set()

    def create(self, shares: Sequence[float]) -> None:
        """Make the cgroups with their first quotas. Raises OSError where we may not."""
        for group, share in zip(self._groups, shares, strict=True):
            group.mkdir()
            self.write_quota(group, quota_us(share, self._period_us), self._period_us)

    @abstractmethod
    def write_quota(self, group: Path, quota: int | None, period: int) -> None:
        """Allow a cgroup ``quota`` microseconds of CPU time in every ``period``; None: all."""

    def cgroups(self) -> Sequence[Path]:
        """The cgroup of each worker."""
        return self._groups

    def attach(self, rank: int, pid: int) -> None:  # noqa: B027
        """Nothing to do: the worker has entered its cgroup by itself (see ``_exec``)."""

    def apply(self, shares: Sequence[float]) -> None:
        """Change the quotas of the workers that have not been released."""
        for rank, (group, share) in enumerate(zip(self._groups, shares, strict=True)):
            if rank not in self._released:
                self.write_quota(group, quota_us(share, self._period_us), self._period_us)

    def release(self, rank: int) -> None:
        """Lift the quota of one worker."""
        self._released.add(rank)
        self.write_quota(self._groups[rank], None, self._period_us)

    def close(self) -> None:
        """Remove the cgroups, with what may still be in them."""
        for group in self._groups:
            _reaper.remove(str(group))


@final
class CgroupV1(CgroupThrottle):
    """Quotas in ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us``."""

    def write_quota(self, group: Path, quota: int | None, period: int) -> None:
        """Write the period first: the kernel checks every quota against it."""
        (group / "cpu.cfs_period_us").write_text(str(period), encoding="ascii")
        (group / "cpu.cfs_quota_us").write_text(str(quota or -1), encoding="ascii")


@final
class CgroupV2(CgroupThrottle):
    """Quotas in ``cpu.max``."""

    def write_quota(self, group: Path, quota: int | None, period: int) -> None:
        """Write both figures at once, as this file wants it."""
        (group / "cpu.max").write_text(f"{quota or 'max'} {period}", encoding="ascii")


def open_groups(shares: Sequence[float], period_us: int) -> CgroupThrottle | None:
    """Make one cgroup per worker at the first place that lets us; None where none does."""
    for version, base in _places():
        remove_leftovers(base)
        kind = CgroupV1 if version == 1 else CgroupV2
        groups = kind(base, len(shares), period_us)
        try:
            groups.create(shares)
            if _can_enter(groups.cgroups()[0]):
                return groups
        except OSError:
            pass
        groups.close()
    return None


def _places() -> Iterator[tuple[int, Path]]:
    """Cgroups that may take ours as children, the nearest to our own first."""
    for controller in _controllers_here():
        if controller.version == 1:
            yield 1, controller.own
        else:
            yield from ((2, group) for group in _upwards(controller) if _hands_on_cpu(group))


def _hands_on_cpu(group: Path) -> bool:
    """Whether children of a version 2 cgroup have cpu quotas, after asking for it."""
    control = group / "cgroup.subtree_control"
    try:
        if "cpu" not in control.read_text(encoding="ascii").split():
            control.write_text("+cpu", encoding="ascii")
    except OSError:  # no such controller, not ours to write, or processes of its own in the way
        return False
    return True


def _can_enter(group: Path) -> bool:
    """Try it with a process that ends at once: rights to move differ from rights to create."""
    python = [sys.executable, "-I", "-S"]
    command = [*python, _exec.__file__, str(os.getpid()), str(group / "cgroup.procs")]
    probe = subprocess.run(
        [*command, *python, "-c", ""],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return probe.returncode == 0


def remove_leftovers(base: Path) -> None:
    """Remove the empty cgroups of launches whose process is gone, where their guard died too.

    What is still populated is left alone: it may belong to a container that numbers its processes
    differently from us.
    """
    for group in base.glob(f"{PREFIX}-*-*-*"):
        pid = group.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with suppress(OSError):
                group.rmdir()
