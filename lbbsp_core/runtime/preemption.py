"""Preemption: SIGTERM asks a worker to leave, and all workers save a checkpoint first.

Schedulers send it before they take a machine away, and wait (Slurm's KillWait and Kubernetes'
terminationGracePeriodSeconds are 30 s) before they kill. The request travels with the exchange of
a step, so that all workers leave after the same step.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

from lbbsp_core.runtime.exit import end_now

logger = logging.getLogger("lbbsp.checkpoint")

STATUS: Final = 128 + signal.SIGTERM
"""Exit status of workers that have left on request: 143, as after SIGTERM itself."""

_REPEAT_SECONDS: Final = 1.0
"""Time within which several signals are one request: of the scheduler and of the launcher."""


class PreemptionHandler:
    """Handler of SIGTERM while a training can save its state; it is opened and closed.

    A second signal, later, ends the process at once.

    Args:
        request: Called at the first signal, on the main thread between two instructions of Python.
    """

    def __init__(self, request: Callable[[], None]) -> None:
        self._request = request
        self._since: float | None = None

    def open(self) -> None:
        """Handles SIGTERM from now on, unless the script has a handler of its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGTERM)
        # A training that failed has not closed its own.
        ours = isinstance(getattr(handler, "__self__", None), PreemptionHandler)
        if handler is not signal.SIG_DFL and not ours:
            logger.debug("SIGTERM has a handler already: it does not save a checkpoint")
            return
        signal.signal(signal.SIGTERM, self._handle)

    def close(self) -> None:
        """Restores the default: SIGTERM ends the process."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._request()
        elif now > self._since + _REPEAT_SECONDS:
            end_now(STATUS)
