"""Bounded waiting: MXNet's own waits for peers and servers have no time-out."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lbbsp_core.runtime.exit import end_now

_LOOK_SECONDS = 0.2


class Watchdog:
    """Ends the process, with a message, when a wait takes too long.

    MXNet waits inside its own library, where no exception reaches it: a thread keeps an eye on
    the clock, and the only cure that it has is to end the process, which the launcher, or
    whoever started the job, notices.
    """

    def __init__(self) -> None:
        self._waits: dict[object, tuple[float, str]] = {}  # several threads may wait
        threading.Thread(target=self._look, name="lbbsp-watch", daemon=True).start()

    @contextmanager
    def waiting(self, seconds: float, message: str) -> Iterator[None]:
        """Waits within take at most `seconds`, or the process ends with `message`."""
        key = object()
        self._waits[key] = time.monotonic() + seconds, message
        try:
            yield
        finally:
            del self._waits[key]

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            for deadline, message in list(self._waits.values()):
                if time.monotonic() > deadline:
                    print(f"lbbsp: {message}", file=sys.stderr)
                    end_now(1)
