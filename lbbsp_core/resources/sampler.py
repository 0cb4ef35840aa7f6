"""`ResourceSampler`: samples the driving factors of the next step."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Final, final

from lbbsp_core.resources.base import DESCRIPTIONS
from lbbsp_core.resources.cgroup import cpu_quotas
from lbbsp_core.resources.host import Host
from lbbsp_core.resources.polling import PolledSource, Polling
from lbbsp_core.resources.sources import SOURCES
from lbbsp_core.validate import require_known

DEFAULT_NAMES: Final = (
    "cpu_other_percent",
    "runnable",
    "memory_percent",
    "throttled_percent",
    "steal_percent",
)
"""Driving factors sampled by default; `DEFAULT_GPU_NAMES` are added if there is a GPU."""

DEFAULT_QUOTA_NAMES: Final = ("cgroup_other_percent",)
"""Added by default where a quota bounds the CPU time of a cgroup."""

MEMORY_OF_GPU: Final = "gpu_memory_percent"
DEFAULT_GPU_NAMES: Final = ("gpu_percent", MEMORY_OF_GPU)

_logger = logging.getLogger("lbbsp.resources")


@final
class ResourceSampler:
    """Samples the driving factors of this worker's speed, as late before a step as possible.

    Paper: LB-BSP (arXiv 1806.02508) predicts speeds from past *and current* CPU and memory use.
    Ours: a worker is slowed down by what other processes use, so their use is separated from its
    own. Times are percents of one core (or of the GPU), means over the last 50 to 100 ms;
    ``runnable`` is the value at the time of sampling. All values are finite, >= 0 and bounded.

    A sample takes 100 to 200 microseconds with cold caches, never blocks and never raises. A factor
    that cannot be read keeps its last value, or 0, and this is logged once. A background thread
    reads totals every 50 ms, so that the window has a start. Slow sources (``/proc/stat`` of very
    many cores) and those that may block (the GPU driver takes locks) are read by it alone. A
    forked child opens its own sources.

    Args:
        names: Driving factors to sample, in this order; keys of `ResourceSampler.available`.
            Default: CPU time of other processes, runnable tasks, memory, throttling and steal
            time where available, CPU time of other processes in the cgroup if it has a quota, and
            utilisation and memory of the GPU if there is one. The cost of a prediction grows with
            their number.
        gpu: Index of the GPU of this process among ``CUDA_VISIBLE_DEVICES``, >= 0.
        host: Machine to read. Tests pass a fake host.

    Raises:
        ValueError: A name is unknown or repeated, or `gpu` is negative.

    Example:
        >>> with ResourceSampler(("cpu_other_percent", "runnable")) as sampler:
        ...     drivers = sampler.sample()              # call it before each step
        >>> len(drivers), sampler.names
        (2, ('cpu_other_percent', 'runnable'))

    References:
        Chen et al., arXiv 1806.02508.
    """

    available: Final[Mapping[str, str]] = DESCRIPTIONS

    def __init__(
        self, names: Sequence[str] | None = None, *, gpu: int = 0, host: Host | None = None
    ) -> None:
        if gpu < 0:
            raise ValueError(f"gpu must be >= 0, got {gpu}: use 0 for the first visible GPU")
        self._host = replace(host or Host(), gpu=gpu)
        if names is not None:
            self.names = check_names(names)
            self._open(self.names, logging.INFO)
        else:
            of_quota = DEFAULT_QUOTA_NAMES if cpu_quotas(self._host) else ()
            default_names = (*DEFAULT_NAMES, *of_quota, *DEFAULT_GPU_NAMES)
            self._open(default_names, logging.DEBUG)
            readable = {factor.name for polled in self._sources for factor in polled.source.factors}
            self.names = tuple(name for name in default_names if name in readable)
        self._values = dict.fromkeys(self.names, 0.0)
        self._update()

    def _open(self, factor_names: Sequence[str], level: int) -> None:
        """Opens the sources of some factors, or logs that one is unavailable."""
        self._sources: list[PolledSource] = []
        for open_source, names in SOURCES.items():
            if set(factor_names).isdisjoint(names.split()):
                continue
            host = replace(self._host, opened=ExitStack())
            try:
                self._sources.append(PolledSource(open_source(host), host, factor_names))
            except Exception as error:  # no such file, or another format: other kernels, sandboxes
                text = "The driving factors %s are unavailable here and stay 0: %s"
                _logger.log(level, text, ", ".join(names.split()), error)
                host.opened.close()
        self._polling = Polling(self._sources)
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._close = weakref.finalize(self, self._polling.close)

    def sample(self) -> tuple[float, ...]:
        """Returns the current driving factors, in the order of `names`. Call it before each step.

        After `close` it returns the last sample.
        """
        if os.getpid() != self._pid:
            self._reopen_after_fork()
        if self._lock.acquire(blocking=False):  # if another thread samples, its values are used
            try:
                if self._close.alive:
                    self._polling.refresh()
                    self._update()
            finally:
                self._lock.release()
        return tuple(self._values.values())

    def _update(self) -> None:
        for polled in self._sources:
            self._values.update(polled.values())

    def _reopen_after_fork(self) -> None:
        """Replaces the parent's sources: they describe the parent, and its thread is not copied."""
        was_open = self._close.detach() is not None
        for polled in self._sources:
            if not polled.source.may_block:  # the parent's thread may hold its lock
                with suppress(OSError):
                    polled.close()
        self._open(self.names if was_open else (), logging.DEBUG)

    def close(self) -> None:
        """Closes all sources and ends the background thread."""
        with self._lock:
            self._close()

    def __enter__(self) -> ResourceSampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns `names` as a tuple if each is known and none is repeated."""
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        require_known("driving factor", name, DESCRIPTIONS)
    if len(set(names)) < len(names):
        raise ValueError(f"driving factors {names} contain a repeated name: use each name once")
    return names
