"""Calls on a background thread, for frameworks that report completion only by blocking."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundThread:
    """Thread that runs calls one after the other. It is kept: at exit Python 3.12 starts no other.

    The thread is a daemon, so that the process can end while a call is waiting.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Runs a function without arguments, after all earlier ones; returns at once."""
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
    """Returns the thread that all sessions of this process share."""
    return BackgroundThread("lbbsp-background")
