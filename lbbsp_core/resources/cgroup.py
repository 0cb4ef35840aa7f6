"""Control groups of this process, versions 1 and 2: where they are, and their limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePosixPath
from typing import NamedTuple

from lbbsp_core.resources.host import Host


class Cgroup(NamedTuple):
    """Cgroup that contains this process."""

    version: int
    path: PurePosixPath


def hierarchies(host: Host, controller: str) -> list[list[Cgroup]]:
    """Returns, for each mount that may have a controller, our cgroup there and its ancestors.

    Version 1 comes first. In a container the mount may show a part of the hierarchy that does not
    contain the path of the cgroup; the list then starts with the mount itself. The controller ""
    selects version 2 only.
    """
    try:
        mounts = host.read_text("/proc/self/mountinfo")
        memberships = host.read_text("/proc/self/cgroup").splitlines()
    except OSError:
        return []
    lines = [line.split(":", 2) for line in memberships if line.count(":") >= 2]
    owns = {name: PurePosixPath(path) for _, names, path in lines for name in names.split(",")}
    cgroup_lists = []
    for version, root, mount in sorted(_mounts(mounts, controller)):
        own_path = owns.get(controller if version == 1 else "")
        if own_path is not None:
            path = mount / own_path.relative_to(root) if own_path.is_relative_to(root) else mount
            path = path if host.resolve(path).is_dir() else mount
            ancestors = [parent for parent in path.parents if parent.is_relative_to(mount)]
            cgroup_lists.append([Cgroup(version, directory) for directory in (path, *ancestors)])
    return cgroup_lists


def own_cgroups(host: Host, controller: str) -> list[Cgroup]:
    """Returns our cgroup and its ancestors in the first of the `hierarchies`; empty if none."""
    return next(iter(hierarchies(host, controller)), [])


def _mounts(mounts: str, controller: str) -> Iterator[tuple[int, PurePosixPath, PurePosixPath]]:
    """Yields version, root within the hierarchy and mount point of each candidate mount."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        file_system, _source, options = after.split(" ", 2)
        root, mount = (PurePosixPath(p.replace("\\040", " ")) for p in before.split(" ")[3:5])
        if file_system == "cgroup2":
            yield 2, root, mount
        elif file_system == "cgroup" and controller in options.split(","):
            yield 1, root, mount


def is_root(host: Host, group: Cgroup) -> bool:
    """Returns whether a cgroup is the root of its hierarchy, by files that only roots have or lack.

    In a container the path of its own cgroup may look like that of the root.
    """
    name = "release_agent" if group.version == 1 else "cgroup.type"
    return host.resolve(group.path / name).exists() == (group.version == 1)


def cpu_quotas(host: Host) -> list[float]:
    """Returns the CPU quotas, in cores, of this process's cgroups and their ancestors."""
    quotas = []
    for version, path in (group for groups in hierarchies(host, "cpu") for group in groups):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        with suppress(OSError):  # the root has no such file
            words = " ".join(host.read_text(path / name) for name in names).split()
            if len(words) == 2 and words[0] not in ("-1", "max"):
                quotas.append(int(words[0]) / int(words[1]))
    return quotas


class MemoryLimit(NamedTuple):
    """Memory limit of a cgroup, and the files with its usage, all in bytes."""

    limit: int
    usage_path: PurePosixPath
    stat_path: PurePosixPath  # usage by kind
    cache_key: bytes  # of the bytes in `stat_path` that can be reclaimed at once


def memory_limit(host: Host) -> MemoryLimit | None:
    """Returns the lowest memory limit of the cgroup and its ancestors; None if unlimited."""
    limits = []
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file"),
        2: ("memory.max", "memory.current", b"inactive_file"),
    }
    for version, path in own_cgroups(host, "memory"):
        limit, usage, cache_key = names[version]
        with suppress(OSError):
            text = host.read_text(path / limit).strip()
            if text.isdigit() and 0 < int(text) < 1 << 60:  # version 1: unlimited is a huge number
                stat = path / "memory.stat"
                limits.append(MemoryLimit(int(text), path / usage, stat, cache_key))
    return min(limits, default=None)
