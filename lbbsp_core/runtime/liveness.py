"""Time limits for waits, where those of the framework have none."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lbbsp_core.runtime.exit import end_now

_CHECK_SECONDS = 0.2


class Watchdog:
    """Ends the process, with a message, when a wait takes too long.

    An exception cannot interrupt a framework that waits inside its own library. A thread
    therefore watches the clock and ends the process, which the launcher or the scheduler of the
    job detects.
    """

    def __init__(self) -> None:
        self._deadlines: dict[object, tuple[float, str]] = {}  # several threads may wait
        threading.Thread(target=self._watch, name="lbbsp-watchdog", daemon=True).start()

    @contextmanager
    def deadline(self, seconds: float, message: str) -> Iterator[None]:
        """Ends the process with `message` if the context lasts longer than `seconds`."""
        key = object()
        self._deadlines[key] = time.monotonic() + seconds, message
        try:
            yield
        finally:
            del self._deadlines[key]

    def _watch(self) -> None:
        while True:
            time.sleep(_CHECK_SECONDS)
            for deadline, message in list(self._deadlines.values()):
                if time.monotonic() > deadline:
                    print(f"lbbsp: {message}", file=sys.stderr)
                    end_now(1)
