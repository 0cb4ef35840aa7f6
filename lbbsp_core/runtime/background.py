"""Calls on a background thread, for frameworks that report completion only by blocking."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Call that runs on the single background thread of the process, after all earlier ones.

    Args:
        call: Function without arguments; `result` returns its value or raises its exception.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._call = call
        _queue().put(self._run)

    def result(self) -> T:
        """Waits for the call, and returns its value or raises its exception."""
        return self._future.result()

    def _run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as error:  # `result` raises it
            self._future.set_exception(error)


@lru_cache(maxsize=1)
def _queue() -> SimpleQueue[Callable[[], None]]:
    """Starts the thread, a daemon: the process can end while it waits."""
    queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
    threading.Thread(target=_work, args=(queue,), name="lbbsp-background", daemon=True).start()
    return queue


def _work(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()
