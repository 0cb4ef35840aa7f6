"""Bounded waiting, where a framework's own waits have no time-out."""

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

    A framework that waits inside its own library cannot be interrupted by an exception: a thread
    watches the clock and ends the process, which the launcher, or whoever started the job,
    notices.
    """

    def __init__(self) -> None:
        self._deadlines: dict[object, tuple[float, str]] = {}  # several threads may wait
        threading.Thread(target=self._watch, name="lbbsp-watchdog", daemon=True).start()

    @contextmanager
    def deadline(self, seconds: float, message: str) -> Iterator[None]:
        """Bounds the waits inside the context to `seconds`, or the process ends with `message`."""
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
