"""Where our cgroup is, and what it tells: throttling and the memory limit, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple, final

from lbbsp_core.resources.base import Factor
from lbbsp_core.resources.host import File, Host


class Group(NamedTuple):
    """A cgroup that we are in: of which version, and where."""

    version: int
    path: PurePosixPath


def groups(host: Host, controller: str) -> list[Group]:
    """Our own cgroup of a controller ("cpu", "memory"; "": version 2 only), then its ancestors.

    The controller's version 1 hierarchy where it is mounted, version 2 else. A container may see
    its own part of the hierarchy at the mount, whatever its path says; then that is the first.
    """
    try:
        mounts, memberships = host.text("/proc/self/mountinfo"), host.text("/proc/self/cgroup")
    except OSError:
        return []
    for version, root, mount in sorted(_mounts(mounts, controller)):
        own = _own(memberships, controller if version == 1 else "")
        if own is not None:
            place = mount / own.relative_to(root) if own.is_relative_to(root) else mount
            if not (host.root / str(place).lstrip("/")).is_dir():
                place = mount
            paths = [place, *(path for path in place.parents if path.is_relative_to(mount))]
            return [Group(version, path) for path in paths]
    return []


def own_file(host: Host, controller: str, name: str) -> PurePosixPath:
    """The file `name` of our own cgroup. Raises FileNotFoundError where we are in none."""
    own = groups(host, controller)
    if not own:
        raise FileNotFoundError(f"no cgroup of the controller {controller!r}")
    return own[0].path / name


def _mounts(mounts: str, controller: str) -> Iterator[tuple[int, PurePosixPath, PurePosixPath]]:
    """Version, root within the hierarchy, and place of each mount that may hold a controller."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _source, options = after.split(" ", 2)
        root, mount = (_unescaped(path) for path in before.split(" ")[3:5])
        if kind == "cgroup2":
            yield 2, root, mount
        elif kind == "cgroup" and controller in options.split(","):
            yield 1, root, mount


def _unescaped(path: str) -> PurePosixPath:
    return PurePosixPath(path.replace("\\040", " "))


def _own(memberships: str, controller: str) -> PurePosixPath | None:
    """Our path in the hierarchy of a controller."""
    for line in memberships.splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return PurePosixPath(path)
    return None


@final
class Throttling:
    """cpu.stat of our cgroup and its ancestors: any of them may hold us back."""

    shortest = 0.001

    def __init__(self, host: Host) -> None:
        places = [host.root / str(group.path).lstrip("/") for group in groups(host, "cpu")]
        paths = [place / "cpu.stat" for place in places if (place / "cpu.stat").is_file()]
        self._files = [File(path, 2048) for path in paths]
        if not self._files:
            raise FileNotFoundError("no cgroup with a cpu controller")
        self.factors = (
            Factor("throttled_percent", 100.0 * len(host.cores), 100.0),
            Factor("throttled_periods_per_second", 1e6, 1.0),
        )

    def read(self) -> tuple[float, ...]:
        """Seconds and periods."""
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
        """Close the files."""
        for file in self._files:
            file.close()


class MemoryLimit(NamedTuple):
    """Bytes that a cgroup may use, and where it tells how many it does.

    Args:
        limit: Bytes.
        used: File: bytes in use.
        stat: File: of what kinds they are.
        cache: The key in `stat` of those that could be had back at once.
    """

    limit: int
    used: PurePosixPath
    stat: PurePosixPath
    cache: bytes


def memory_limit(host: Host) -> MemoryLimit | None:
    """The lowest memory limit that we are under; None where there is none."""
    found = []
    for version, path in groups(host, "memory"):
        v1 = version == 1
        try:
            text = host.text(path / ("memory.limit_in_bytes" if v1 else "memory.max")).strip()
        except OSError:
            continue
        if text.isdigit() and 0 < int(text) < 1 << 60:  # version 1 says "none" by a huge number
            used = path / ("memory.usage_in_bytes" if v1 else "memory.current")
            cache = b"total_inactive_file" if v1 else b"inactive_file"
            found.append(MemoryLimit(int(text), used, path / "memory.stat", cache))
    return min(found, default=None)
