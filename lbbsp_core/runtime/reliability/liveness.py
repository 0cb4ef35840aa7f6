"""Threads that read the clock, and end a process that a framework keeps waiting.

An exception cannot interrupt a framework that waits inside its own library, so a thread ends the
process. The others, or the launcher or scheduler of the job, detect that. `background_thread` makes
calls for frameworks that report completion only by blocking.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from lbbsp_core.runtime.reliability.exit import end_now

logger = logging.getLogger("lbbsp.liveness")

MAX_COUNTED_SECONDS: Final = 2.0  # of the time between two checks: this process may be suspended
_CHECK_SECONDS: Final = 0.2

T = TypeVar("T")


def print_message(message: str) -> None:
    """Prints a message of this library."""
    with suppress(OSError, ValueError):  # without a usable standard error
        print(f"lbbsp: {message}", file=sys.stderr, flush=True)


def daemon_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Returns a thread that a debugger leaves running while it stops the others at a breakpoint."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    return thread


@dataclass(eq=False)
class Watch:
    """Thread that asks a source regularly for a reason to end the process, and then ends it.

    `check` takes the seconds since the last one, at first about 0, and returns why the process must
    end, or None. `name` returns the name of the process for the message. An error in either has no
    effect: the next check may succeed.
    """

    # Each source has a thread of its own: one that has to wait for a connection or a lock must not
    # keep the others from ending the process.

    check: Callable[[float], str | None]
    name: Callable[[], str] | None = None
    pause_seconds: float = 0.5
    end: Callable[[int, str], object] = end_now

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = daemon_thread(self._run, "lbbsp-watch")

    def start(self) -> None:
        """Starts the thread, once."""
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """Stops after the check in progress."""
        self._stopped.set()

    def join(self, seconds: float | None = None) -> None:
        """Waits until no check is running, after `stop`, or for `seconds` at most."""
        self._thread.join(seconds)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stopped.is_set():
            now, message = time.monotonic(), None
            try:
                if (why := self.check(now - before)) is not None:
                    message = f"lbbsp: {why}" + (f"; {self.name()} ends" if self.name else "")
            except Exception:
                logger.debug("a check has failed", exc_info=True)
            before = now
            if message is not None:
                self.end(1, message)
                return
            self._stopped.wait(self.pause_seconds)


class Watchdog:
    """Ends the process, with a message, when a wait takes too long."""

    def __init__(self) -> None:
        self._deadlines: dict[object, tuple[float, str]] = {}  # several threads may wait
        Watch(self._check, pause_seconds=_CHECK_SECONDS).start()

    @contextmanager
    def deadline(self, seconds: float, message: str) -> Iterator[None]:
        """Ends the process with `message` if the context lasts longer than `seconds`."""
        key = object()
        self._deadlines[key] = time.monotonic() + seconds, message
        try:
            yield
        finally:
            del self._deadlines[key]

    def _check(self, _: float) -> str | None:
        now = time.monotonic()
        return next((why for until, why in list(self._deadlines.values()) if now > until), None)


class BackgroundThread:
    """Thread that runs calls one after the other. It is kept: at exit Python 3.12 starts no other.

    The thread is a daemon, so that the process can end while a call is waiting.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Runs a function without arguments, after all earlier ones; returns at once."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        future: Future[T] = Future()
        self._queue.put((call, future))
        return future

    def _work(self) -> None:
        while True:
            call, future = self._queue.get()
            try:
                future.set_result(call())
            except BaseException as error:  # `Future.result` raises it
                future.set_exception(error)
            del call, future  # while this thread waits, it keeps nothing alive


@lru_cache(maxsize=1)
def background_thread() -> BackgroundThread:
    """Returns the thread on which all sessions of this process pass barriers."""
    return BackgroundThread("lbbsp-background")


@lru_cache(maxsize=1)
def training_thread() -> BackgroundThread:
    """Returns the thread on which the predictors of this process train beside the exchanges."""
    return BackgroundThread("lbbsp-training")


if hasattr(os, "register_at_fork"):  # a fork has none of the threads
    os.register_at_fork(after_in_child=background_thread.cache_clear)
    os.register_at_fork(after_in_child=training_thread.cache_clear)
