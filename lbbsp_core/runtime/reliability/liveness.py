"""Threads that read the clock, and end a process that a framework keeps waiting.

An exception cannot interrupt a framework that waits inside its own library, so a thread ends the
process. The others, or the launcher or scheduler of the job, detect that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from lbbsp_core.runtime.reliability.exit import end_now

logger = logging.getLogger("lbbsp.liveness")

MAX_COUNTED_SECONDS: Final = 2.0
"""Maximum of the time between two looks that counts as a wait: this process may be suspended."""

_CHECK_SECONDS = 0.2


def daemon_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Returns a thread that a debugger leaves running while it stops the others at a breakpoint."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    return thread


class PeriodicThread:
    """Thread that looks regularly for a reason to end the process, and then ends it.

    An error in a look has no effect: the next one may succeed. `look` takes the seconds since the
    last look, and returns why the process must end, or None.
    """

    def __init__(
        self,
        look: Callable[[float], str | None],
        pause_seconds: float,
        name: str,
        end: Callable[[int, str], object] = end_now,
    ) -> None:
        self._look, self._pause_seconds, self._end = look, pause_seconds, end
        self._stopped = threading.Event()
        self._thread = daemon_thread(self._run, name)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Makes a look that is running the last one."""
        self._stopped.set()

    def join(self) -> None:
        """Waits until no look is running, after `stop`."""
        self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(self._pause_seconds):
            now = time.monotonic()
            try:
                why = self._look(now - before)
            except Exception:
                logger.debug("%s: a look has failed", self._thread.name, exc_info=True)
                why = None
            before = now
            if why is not None:
                self._end(1, f"lbbsp: {why}")
                return


class Watchdog:
    """Ends the process, with a message, when a wait takes too long."""

    def __init__(self) -> None:
        self._deadlines: dict[object, tuple[float, str]] = {}  # several threads may wait
        PeriodicThread(self._look, _CHECK_SECONDS, "lbbsp-watchdog").start()

    @contextmanager
    def deadline(self, seconds: float, message: str) -> Iterator[None]:
        """Ends the process with `message` if the context lasts longer than `seconds`."""
        key = object()
        self._deadlines[key] = time.monotonic() + seconds, message
        try:
            yield
        finally:
            del self._deadlines[key]

    def _look(self, _: float) -> str | None:
        now = time.monotonic()
        return next((why for until, why in list(self._deadlines.values()) if now > until), None)
