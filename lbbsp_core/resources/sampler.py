"""`ResourceSampler`: the driving factors of the next step."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, final

from lbbsp_core.resources import portable
from lbbsp_core.resources.base import NAMES, Source
from lbbsp_core.resources.cgroup import Throttling
from lbbsp_core.resources.gpu import Gpu
from lbbsp_core.resources.host import Host
from lbbsp_core.resources.linux import Cores, Memory, Pressure, Runnable, Switches
from lbbsp_core.resources.polling import Background, PolledSource, release, split
from lbbsp_core.validate import require_known

DEFAULT: Final = (
    "cpu_other_percent",
    "runnable",
    "memory_percent",
    "throttled_percent",
    "steal_percent",
)
"""What is sampled where nothing else is asked for; with a GPU, `DEFAULT_GPU` too."""

DEFAULT_GPU: Final = ("gpu_percent", "gpu_memory_percent")

Opener = Callable[[Host], Source]

LINUX: Final[Mapping[str, Opener]] = {
    "cpu_other_percent": Cores,
    "cpu_own_percent": Cores,
    "steal_percent": Cores,
    "runnable": Runnable,
    "involuntary_switches_per_second": Switches,
    "memory_percent": Memory,
    "memory_own_percent": Memory,
    "throttled_percent": Throttling,
    "throttled_periods_per_second": Throttling,
    "cpu_pressure_percent": Pressure,
}

ELSEWHERE: Final[Mapping[str, Opener]] = {
    "cpu_other_percent": portable.PortableCores,
    "cpu_own_percent": portable.PortableCores,
    "runnable": portable.PortableQueue,
    "involuntary_switches_per_second": Switches,
    "memory_percent": portable.PortableMemory,
    "memory_own_percent": portable.PortableMemory,
}

_log = logging.getLogger("lbbsp_core")


@final
class ResourceSampler:
    """Samples what drives this worker's speed, as late before a step as possible.

    LB-BSP (arXiv 1806.02508) predicts from past *and current* CPU and memory use. What slows a
    worker down is what others take, so that is told apart from its own. Times are percents of
    one core (or of the GPU), counts are per second, both means since the sample before;
    ``runnable`` is of this moment. All are finite, >= 0 and bounded.

    A sample costs 160 microseconds with cold caches, never blocks, and never raises: what cannot
    be read (any more) keeps its last value, 0 if there is none, which is logged once. Sources
    that are slow (``/proc/stat`` of very many cores) and the GPU, whose driver may take a lock,
    are read by a thread every 50 ms. A forked child samples for itself.

    Args:
        names: Driving factors, in the order wanted, of `ResourceSampler.available`. Default:
            CPU time of others, tasks that want to run, memory, throttling and steal where the
            machine tells them; where there is a GPU, its use and memory. A predictor's work
            grows with their number; on recorded traces others added nothing to these.
        gpu: Which of the GPUs in ``CUDA_VISIBLE_DEVICES`` this process computes on, >= 0.
        host: The machine; tests pass another.

    Raises:
        ValueError: An unknown or repeated name, or a negative `gpu`.

    Example:
        >>> with ResourceSampler(("cpu_other_percent", "runnable")) as sampler:
        ...     drivers = sampler.sample()              # of the first step; then once a step
        >>> len(drivers), sampler.names
        (2, ('cpu_other_percent', 'runnable'))
    """

    available: Final[Mapping[str, str]] = NAMES

    def __init__(
        self, names: Sequence[str] | None = None, *, gpu: int = 0, host: Host | None = None
    ) -> None:
        if gpu < 0:
            raise ValueError(f"gpu must be >= 0, got {gpu}: 0 is the first visible one")
        self._host, self._gpu = Host() if host is None else host, gpu
        wanted = (*DEFAULT, *DEFAULT_GPU) if names is None else _checked(names)
        self._open(wanted, quiet=names is None)
        told = {factor.name for feed in self._feeds for factor in feed.source.factors}
        self.names: tuple[str, ...] = (
            tuple(name for name in wanted if name in told) if names is None else wanted
        )
        self._last = dict.fromkeys(self.names, 0.0)
        for feed in self._feeds:
            self._last.update(feed.values)

    def _open(self, wanted: Sequence[str], quiet: bool) -> None:
        """Open what tells any of `wanted`, and start counting now."""
        openers = {**(LINUX if self._host.linux else ELSEWHERE)}
        openers.update(dict.fromkeys(DEFAULT_GPU, self._open_gpu))
        self._feeds: list[PolledSource] = []
        for opener in dict.fromkeys(openers[name] for name in wanted if name in openers):
            self._feed(opener, wanted, logging.DEBUG if quiet else logging.INFO)
        self._here, behind = split(self._feeds)
        background = Background(behind)
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._release = weakref.finalize(self, release, self._feeds, background)

    def _open_gpu(self, host: Host) -> Source:
        return Gpu(host, self._gpu)

    def _feed(self, opener: Opener, wanted: Sequence[str], level: int) -> None:
        """Open one source, or log that it tells nothing here."""
        try:
            source = opener(self._host)
        except Exception as error:  # no such file, or not as we know it: other kernels, sandboxes
            _log.log(level, "Some driving factors are not told here and stay 0: %s", error)
            return
        try:
            self._feeds.append(PolledSource(source, self._host.clock, wanted))
        except Exception as error:
            source.close()
            _log.log(level, "Some driving factors cannot be read and stay 0: %s", error)

    def sample(self) -> tuple[float, ...]:
        """The driving factors now, one for each of `names`: those of the step about to begin."""
        if os.getpid() != self._pid:
            self._start_anew()
        if self._lock.acquire(blocking=False):  # another thread samples: its values will do
            try:
                self._measure()
            finally:
                self._lock.release()
        return tuple(self._last.values())

    def _measure(self) -> None:
        if not self._release.alive:
            return
        for feed in self._here:
            feed.refresh()
        for feed in self._feeds:
            feed.report(self._last)

    def _start_anew(self) -> None:
        """After a fork: the parent's files tell of the parent, its thread is not here."""
        open_before = self._release.detach() is not None
        for feed in self._feeds:
            if not isinstance(feed.source, Gpu):  # its library may be locked by that thread
                with suppress(OSError):
                    feed.source.close()
        self._open(self.names if open_before else (), quiet=True)

    def close(self) -> None:
        """Close all files and end the thread; further samples are the last one."""
        with self._lock:
            self._release()

    def __enter__(self) -> ResourceSampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(names: Sequence[str]) -> tuple[str, ...]:
    """`names`, if each is known and none is there twice."""
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        require_known("driving factor", name, NAMES)
    if len(set(names)) < len(names):
        raise ValueError(f"driving factors {names} hold a name twice: name each once")
    return names
