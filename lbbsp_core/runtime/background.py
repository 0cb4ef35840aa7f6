"""Waiting in the background, where a framework reports only by blocking."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """A call made by the one background thread of the process, after all earlier ones.

    Args:
        call: Called in that thread; `result` returns or raises what it does.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self._call = call
        _queue().put(self._run)

    def result(self) -> T:
        """Waits for the call. Returns, or raises, what it did."""
        return self._future.result()

    def _run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as error:  # raised where the result is asked for
            self._future.set_exception(error)


@lru_cache(maxsize=1)
def _queue() -> SimpleQueue[Callable[[], None]]:
    """Starts the thread. It ends with the process, whatever it waits for at that time."""
    queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
    threading.Thread(target=_work, args=(queue,), name="lbbsp-background", daemon=True).start()
    return queue


def _work(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()
