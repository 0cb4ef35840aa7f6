"""Waiting behind the training's back: MXNet says only by blocking that something is there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from queue import SimpleQueue
from typing import Any


class Opening:
    """What a wait will bring, done by a thread that all of them share, in their order.

    Args:
        wait: Called in that thread; what it returns or raises, `result` does.
    """

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()
        _waits().put((wait, self._future))

    def result(self) -> Any:
        """What came of it, once it is there."""
        return self._future.result()


@lru_cache(maxsize=1)
def _waits() -> SimpleQueue[tuple[Callable[[], Any], Future[Any]]]:
    """The queue of a thread that ends with the process, whatever it waits for then."""
    queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
    threading.Thread(target=_work, args=(queue,), name="lbbsp-barrier", daemon=True).start()
    return queue


def _work(queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    while True:
        wait, future = queue.get()
        try:
            future.set_result(wait())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)
