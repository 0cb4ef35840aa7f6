"""Iteration: iterators over one data set after the other, and reads that replicas share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import tensorflow as tf

from lbbsp_tf.compat import Nest

T = TypeVar("T")


class SwitchingIterator:
    """Iterator over one data set after the other, all of the same structure."""

    def __init__(self, element_spec: Nest) -> None:
        # The iterator holds its first data set indefinitely, so that one is empty.
        self._empty = tf.data.Dataset.from_generator(tuple, output_signature=element_spec)
        with tf.device("/CPU:0"):
            self._iterator = iter(self._empty)

    def start(self, dataset: tf.data.Dataset) -> None:
        """Iterates over `dataset` from now on, from its start."""
        with tf.device("/CPU:0"):
            tf.raw_ops.MakeIterator(
                dataset=tf.data.experimental.to_variant(dataset),
                iterator=self._iterator._iterator_resource,
            )

    def stop(self) -> None:
        """Ends the iteration, and releases the data set."""
        # A background thread that prefetches may wait for Python's GIL. An operation releases the
        # GIL while it waits for that thread to end; deleting the iterator may not.
        self.start(self._empty)

    def get_next(self) -> Nest:
        """Returns the next element, also in a graph."""
        return self._iterator.get_next()


class SharedReads(Generic[T]):
    """Reads of one process in a fit: each step is read once, for all replicas of the process.

    Each replica asks for every step once, in order, on its own threads. A replica may be ahead of
    others by the batches that it prefetches. The first to ask for a step reads it, and the others
    wait for the result. Reads never overlap, because whoever asks for a step has got the last one.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._lock = threading.Lock()
        self._reads: dict[int, tuple[Future[T], list[None]]] = {}

    def get(self, step: int, read: Callable[[], T]) -> T:
        """Returns what was read for a step, and forgets it when all replicas have asked for it."""
        with self._lock:
            is_first = step not in self._reads
            future, asked = self._reads.setdefault(step, (Future(), []))
            asked.append(None)
            if len(asked) == self._replicas:
                del self._reads[step]
        if is_first:
            try:
                future.set_result(read())
            except BaseException as error:  # every replica must learn of it
                future.set_exception(error)
        return future.result()
