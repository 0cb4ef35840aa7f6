"""Polling of sources: in the background, and on the sampling thread if reading is fast."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Final, final

from lbbsp_core.resources.base import Meter, Source
from lbbsp_core.resources.host import Host

BUDGET_SECONDS: Final = 100e-6
"""Total read time of the sources that a sample reads; the slowest are read in the background."""

PERIOD_SECONDS: Final = 0.05
"""Time between two readings in the background: windows are up to this much longer than asked."""

CLOSE_SECONDS: Final = 1.0
"""Longest wait for the background to end when a sampler is closed."""

_logger = logging.getLogger("lbbsp.resources")


@final
class PolledSource:
    """Source of a host, with its last readings and the driving factors that follow from them.

    Several threads may refresh it, and ask for its values. The source is read four times at first,
    to measure `read_seconds`, the time of a reading.
    """

    def __init__(self, source: Source, host: Host, names: Collection[str]) -> None:
        self.source, self._host, self._failed = source, host, False
        first = (host.clock(), source.read())
        self._read_at = first[0]
        self.meter = Meter(source.factors, first, names)
        self._reading, self._lock = threading.Lock(), threading.Lock()
        self.read_seconds = min(self._time_read() for _ in range(3))  # least disturbed by others

    def close(self) -> None:
        """Closes what the source has opened."""
        self._host.opened.close()

    def _time_read(self) -> float:
        start = self._host.clock()
        self.source.read()
        return self._host.clock() - start

    def refresh(self) -> None:
        """Reads the source, unless it was read just now or another thread is reading it.

        If reading fails, the last readings are kept and a warning is logged once.
        """
        if not self._reading.acquire(blocking=False):
            return
        try:
            now = self._host.clock()
            if 0 <= now - self._read_at < self.source.min_interval_seconds:
                return
            numbers = self.source.read()
            self._read_at = now
            with self._lock:
                self.meter.add((now, numbers))
        except Exception as error:  # a file vanished, a driver was unloaded
            if not self._failed:
                names = ", ".join(factor.name for factor in self.source.factors)
                _logger.warning(
                    "%s cannot be read any more and keep their last values: %s", names, error
                )
            self._failed = True
        finally:
            self._reading.release()

    def values(self) -> dict[str, float]:
        """Returns the driving factors at the last reading."""
        with self._lock:
            return dict(self.meter.values())


def split(sources: Sequence[PolledSource]) -> tuple[list[PolledSource], list[PolledSource]]:
    """Returns the sources that a sample reads, and those that the background reads.

    Sources that may block, and the slowest ones beyond `BUDGET_SECONDS` in total, are read in
    the background only; sources of rates are read in both, so that there is a start of a window.
    """
    foreground: list[PolledSource] = []
    background: list[PolledSource] = []
    total = 0.0
    for polled in sorted(sources, key=lambda polled: polled.read_seconds):
        total += polled.read_seconds
        is_fast = total <= BUDGET_SECONDS and not polled.source.may_block
        if is_fast:
            foreground.append(polled)
        if polled.meter.has_rates or not is_fast:
            background.append(polled)
    return foreground, background


@final
class Polling:
    """Sources of a sampler: a daemon thread refreshes some of them, `refresh` the fast ones."""

    def __init__(self, sources: Sequence[PolledSource]) -> None:
        self.sources = sources
        self._foreground, self._background = split(sources)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lbbsp-resources", daemon=True)
        if self._background:
            self._thread.start()

    def refresh(self) -> None:
        """Reads the sources that a sample reads."""
        for polled in self._foreground:
            polled.refresh()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            for polled in self._background:
                polled.refresh()

    def close(self) -> None:
        """Stops the thread, waits for it up to `CLOSE_SECONDS`, and closes all sources."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():  # a driver hangs: it may still be reading a source
                return
        for polled in self.sources:
            with suppress(Exception):
                polled.close()
