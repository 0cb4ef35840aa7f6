"""Keeps the last reading of a source, here and now or from a thread in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final, final

from lbbsp_core.resources.base import Meter, Source
from lbbsp_core.resources.gpu import Gpu

BUDGET_SECONDS: Final = 100e-6
"""What the sources read on the spot may take together; the slowest go to the background."""

PERIOD_SECONDS: Final = 0.05
"""Between two readings in the background."""

_log = logging.getLogger("lbbsp_core")


@final
class PolledSource:
    """One source, its last reading, and its meter.

    Args:
        source: Is read some times, to learn what that costs. May raise.
        clock: Seconds, monotonic.
        names: The driving factors that are asked for.
    """

    def __init__(self, source: Source, clock: Callable[[], float], names: Collection[str]) -> None:
        self.source, self._clock, self._failed = source, clock, False
        self._latest = self._seen = (clock(), source.read())
        self._meter = Meter(source.factors, self._latest, names)
        self.values = self._meter.values(self._latest)
        self.cost = min(self._timed() for _ in range(3))  # the others were interrupted

    def _timed(self) -> float:
        start = self._clock()
        self.source.read()
        return self._clock() - start

    def refresh(self) -> None:
        """Read, if it is time to. Where that fails, the last stays, and a warning says so once."""
        now = self._clock()
        if 0 <= now - self._latest[0] < self.source.shortest:
            return
        try:
            self._latest = now, self.source.read()
        except Exception as error:  # a file that vanished, a driver that went away
            if not self._failed:
                names = ", ".join(factor.name for factor in self.source.factors)
                _log.warning("%s cannot be read any more, the last values stay: %s", names, error)
            self._failed = True

    def report(self, values: dict[str, float]) -> None:
        """Put what was read since the last report into `values`."""
        latest = self._latest
        if latest is not self._seen:
            self._seen = latest
            values.update(self._meter.values(latest))


def split(feeds: Sequence[PolledSource]) -> tuple[list[PolledSource], list[PolledSource]]:
    """Those quick enough to be read on the spot, and those for the background.

    The GPU's driver may take a lock, so it is always asked in the background.
    """
    here: list[PolledSource] = []
    background: list[PolledSource] = []
    spent = 0.0
    for feed in sorted(feeds, key=lambda feed: feed.cost):
        spent += feed.cost
        quick = spent <= BUDGET_SECONDS and not isinstance(feed.source, Gpu)
        (here if quick else background).append(feed)
    return here, background


@final
class Background:
    """A daemon thread that refreshes feeds every 50 ms until it is stopped; none for no feeds.

    Args:
        feeds: Which ones.
    """

    def __init__(self, feeds: Sequence[PolledSource]) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if feeds:
            args = (list(feeds), self._stop)
            name = "lbbsp-drivers"
            self._thread = threading.Thread(target=_refresh, args=args, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> bool:
        """End the thread, wait for it a second. Returns whether it has ended."""
        self._stop.set()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(1.0)
        return not self._thread.is_alive()


def _refresh(feeds: list[PolledSource], stop: threading.Event) -> None:
    while not stop.wait(PERIOD_SECONDS):
        for feed in feeds:
            feed.refresh()


def release(feeds: Sequence[PolledSource], background: Background) -> None:
    """Stop the thread and close the sources, but for those that a stuck thread still uses."""
    if background.stop():
        for feed in feeds:
            with suppress(Exception):
                feed.source.close()
