"""Control groups of this process, versions 1 and 2: CPU throttling and the memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple, final

from lbbsp_core.resources.base import Factor
from lbbsp_core.resources.host import Host


class Cgroup(NamedTuple):
    """Cgroup that contains this process."""

    version: int
    path: PurePosixPath


def own_cgroups(host: Host, controller: str) -> list[Cgroup]:
    """Returns the cgroup of this process for a controller, followed by its ancestors.

    The version 1 hierarchy is used if it is mounted, version 2 otherwise. In a container the mount
    may show a part of the hierarchy that does not contain the path of the cgroup; the list then
    starts with the mount itself. The controller "" selects version 2 only. There may be no such
    hierarchy, and so no cgroup.
    """
    try:
        mounts = host.read_text("/proc/self/mountinfo")
        memberships = host.read_text("/proc/self/cgroup")
    except OSError:
        return []
    for version, root, mount in sorted(_mounts(mounts, controller)):
        own = _membership(memberships, controller if version == 1 else "")
        if own is not None:
            path = mount / own.relative_to(root) if own.is_relative_to(root) else mount
            if not host.resolve(path).is_dir():
                path = mount
            ancestors = [parent for parent in path.parents if parent.is_relative_to(mount)]
            return [Cgroup(version, directory) for directory in (path, *ancestors)]
    return []


def is_root(host: Host, group: Cgroup) -> bool:
    """Returns whether a cgroup is the root of its hierarchy, by files that only roots have or lack.

    In a container the path of its own cgroup may look like that of the root.
    """
    if group.version == 1:
        return host.resolve(group.path / "release_agent").exists()
    return not host.resolve(group.path / "cgroup.type").exists()


def has_cpu_quota(host: Host) -> bool:
    """Returns whether the cgroup of this process, or one above it, has a CPU quota."""
    return any(_limits_cpu(host, group) for group in own_cgroups(host, "cpu"))


def _limits_cpu(host: Host, group: Cgroup) -> bool:
    name = "cpu.cfs_quota_us" if group.version == 1 else "cpu.max"
    try:
        return host.read_text(group.path / name).split()[0] not in ("-1", "max")
    except (OSError, IndexError):  # the root has no such file
        return False


def own_file(host: Host, controller: str, name: str) -> PurePosixPath:
    """Returns the path of the file `name` in the cgroup of this process."""
    cgroups = own_cgroups(host, controller)
    if not cgroups:
        raise FileNotFoundError(f"this process is in no cgroup of the controller {controller!r}")
    return cgroups[0].path / name


def _mounts(mounts: str, controller: str) -> Iterator[tuple[int, PurePosixPath, PurePosixPath]]:
    """Yields version, root within the hierarchy and mount point of each candidate mount."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        file_system, _source, options = after.split(" ", 2)
        root, mount = (_unescape(path) for path in before.split(" ")[3:5])
        if file_system == "cgroup2":
            yield 2, root, mount
        elif file_system == "cgroup" and controller in options.split(","):
            yield 1, root, mount


def _unescape(path: str) -> PurePosixPath:
    return PurePosixPath(path.replace("\\040", " "))


def _membership(memberships: str, controller: str) -> PurePosixPath | None:
    """Returns the path of this process in the hierarchy of a controller."""
    for line in memberships.splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return PurePosixPath(path)
    return None


@final
class CpuThrottling:
    """Throttling by CPU quotas: ``cpu.stat`` of the cgroup and of its ancestors.

    The ancestors are included because a quota at any level throttles this process.
    """

    min_interval_seconds = 0.001
    may_block = False

    def __init__(self, host: Host) -> None:
        paths = [cgroup.path / "cpu.stat" for cgroup in own_cgroups(host, "cpu")]
        self._files = [host.open(path, 2048) for path in paths if host.resolve(path).is_file()]
        if not self._files:
            raise FileNotFoundError("this process is in no cgroup with a CPU controller")
        self.factors = (
            Factor("throttled_percent", 100.0 * len(host.cores), 100.0),
            Factor("throttled_periods_per_second", 1e6, 1.0),
        )

    def read(self) -> tuple[float, ...]:
        """Returns throttled seconds and throttled periods, both running totals."""
        seconds, periods = 0.0, 0
        for file in self._files:
            words = file.read().split()
            for key, number in zip(words[::2], words[1::2], strict=False):
                if key == b"nr_throttled":
                    periods += int(number)
                elif key == b"throttled_usec":
                    seconds += int(number) / 1e6
                elif key == b"throttled_time":  # version 1
                    seconds += int(number) / 1e9
        return seconds, float(periods)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()


@final
class CpuUsage:
    """CPU time of the innermost cgroup of this process, its children included, in microseconds.

    Version 2 has it in ``cpu.stat``, with or without a CPU controller; version 1 in
    ``cpuacct.usage``.
    """

    def __init__(self, host: Host) -> None:
        for controller in ("cpuacct", ""):
            own = next(iter(own_cgroups(host, controller)), None)
            if own is not None and not is_root(host, own):
                name = "cpuacct.usage" if own.version == 1 else "cpu.stat"
                self._file = host.open(own.path / name, 2048)
                return
        raise FileNotFoundError("this process is in no cgroup below the root that shows CPU time")

    def seconds(self) -> float:
        """Returns the CPU seconds of all processes of the cgroup."""
        words = self._file.read().split()
        if len(words) == 1:
            return int(words[0]) / 1e9
        return int(words[words.index(b"usage_usec") + 1]) / 1e6

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class MemoryLimit(NamedTuple):
    """Memory limit of a cgroup, and the files with its usage.

    Args:
        limit: Limit in bytes.
        usage_path: File with the bytes in use.
        stat_path: File with the bytes in use by kind.
        cache_key: Key in `stat_path` of the bytes that can be reclaimed at once.
    """

    limit: int
    usage_path: PurePosixPath
    stat_path: PurePosixPath
    cache_key: bytes


def memory_limit(host: Host) -> MemoryLimit | None:
    """Returns the lowest memory limit of the cgroup and its ancestors; None if unlimited."""
    limits = []
    for version, path in own_cgroups(host, "memory"):
        v1 = version == 1
        try:
            text = host.read_text(path / ("memory.limit_in_bytes" if v1 else "memory.max")).strip()
        except OSError:
            continue
        if text.isdigit() and 0 < int(text) < 1 << 60:  # version 1: unlimited is a huge number
            usage = path / ("memory.usage_in_bytes" if v1 else "memory.current")
            cache_key = b"total_inactive_file" if v1 else b"inactive_file"
            limits.append(MemoryLimit(int(text), usage, path / "memory.stat", cache_key))
    return min(limits, default=None)
