"""Calls on a background thread, for frameworks that report completion only by blocking."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class BackgroundThread:
    """Thread that runs calls one after the other. It is kept: at exit Python 3.12 starts no other.

    The thread is a daemon, so that the process can end while a call is waiting.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Runs a function without arguments, after all earlier ones; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._queue.put(partial(_run, call, future))
        return future

    def _work(self) -> None:
        while True:
            self._queue.get()()


def _run(call: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # `Future.result` raises it
        future.set_exception(error)


@lru_cache(maxsize=1)
def background_thread() -> BackgroundThread:
    """Returns the thread that all sessions of this process share."""
    return BackgroundThread("lbbsp-background")
