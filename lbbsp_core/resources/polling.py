"""Polling of sources: on the sampling thread, or on a background thread if reading is slow."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final, final

from lbbsp_core.resources.base import Meter, Source

BUDGET_SECONDS: Final = 100e-6
"""Total read time of the foreground sources; the slowest ones go to the background."""

PERIOD_SECONDS: Final = 0.05
"""Time between two readings in the background."""

THREAD_NAME: Final = "lbbsp-resources"

_logger = logging.getLogger("lbbsp.resources")


@final
class PolledSource:
    """Source with its last reading and its meter.

    Args:
        source: Open source. It is read four times, to measure the time of a reading.
        clock: Returns monotonic seconds.
        names: Names of the driving factors to compute.

    Attributes:
        read_seconds: Time of one reading.
        values: Driving factors at the first reading.

    Raises:
        Exception: Any exception of `source.read`.
    """

    def __init__(self, source: Source, clock: Callable[[], float], names: Collection[str]) -> None:
        self.source, self._clock, self._failed = source, clock, False
        self._latest = self._converted = (clock(), source.read())
        self._meter = Meter(source.factors, self._latest, names)
        self.values = self._meter.values(self._latest)
        self.read_seconds = min(self._time_read() for _ in range(3))  # least disturbed by others

    def _time_read(self) -> float:
        start = self._clock()
        self.source.read()
        return self._clock() - start

    def refresh(self) -> None:
        """Reads the source if its minimum interval has passed.

        If reading fails, the last reading is kept and a warning is logged once.
        """
        now = self._clock()
        if 0 <= now - self._latest[0] < self.source.min_interval_seconds:
            return
        try:
            self._latest = now, self.source.read()
        except Exception as error:  # a file vanished, a driver was unloaded
            if not self._failed:
                names = ", ".join(factor.name for factor in self.source.factors)
                _logger.warning(
                    "%s cannot be read any more and keep their last values: %s", names, error
                )
            self._failed = True

    def update(self, values: dict[str, float]) -> None:
        """Updates `values` with the driving factors of the latest reading, if it is a new one."""
        latest = self._latest
        if latest is not self._converted:
            self._converted = latest
            values.update(self._meter.values(latest))


def split(sources: Sequence[PolledSource]) -> tuple[list[PolledSource], list[PolledSource]]:
    """Splits sources into those read in the foreground and those read in the background.

    Sources that may block, and the slowest ones beyond `BUDGET_SECONDS` in total, are read in
    the background.
    """
    foreground: list[PolledSource] = []
    background: list[PolledSource] = []
    total = 0.0
    for polled in sorted(sources, key=lambda polled: polled.read_seconds):
        total += polled.read_seconds
        is_fast = total <= BUDGET_SECONDS and not polled.source.may_block
        (foreground if is_fast else background).append(polled)
    return foreground, background


@final
class BackgroundPoller:
    """Daemon thread that refreshes sources every `PERIOD_SECONDS` until it is stopped.

    Args:
        sources: Sources to refresh. No thread is started if there are none.
    """

    def __init__(self, sources: Sequence[PolledSource]) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if sources:
            args = (list(sources), self._stop)
            self._thread = threading.Thread(
                target=_refresh_until, args=args, name=THREAD_NAME, daemon=True
            )
            self._thread.start()

    def stop(self) -> bool:
        """Stops the thread and waits up to one second. Returns whether it has ended."""
        self._stop.set()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(1.0)
        return not self._thread.is_alive()


def _refresh_until(sources: list[PolledSource], stop: threading.Event) -> None:
    while not stop.wait(PERIOD_SECONDS):
        for polled in sources:
            polled.refresh()


def close_all(sources: Sequence[PolledSource], background: BackgroundPoller) -> None:
    """Stops the background thread, then closes all sources.

    If the thread does not end, for example because a driver hangs, the sources stay open: the
    thread may still be reading one of them.
    """
    if background.stop():
        for polled in sources:
            with suppress(Exception):
                polled.source.close()
