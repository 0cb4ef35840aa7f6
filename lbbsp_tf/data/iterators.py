"""Iterators over one data set after the other, all of the same structure."""

from __future__ import annotations

import tensorflow as tf

from lbbsp_tf import compat
from lbbsp_tf.compat import Nest


class SwitchingIterator:
    """Iterator over one data set after the other."""

    def __init__(self, element_spec: Nest) -> None:
        self.element_spec = element_spec
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


class BatchIterator(SwitchingIterator):
    """Iterator from which a step draws; one that is traced once trains on further data sets."""

    def __init__(self, element_spec: Nest) -> None:
        super().__init__(element_spec)
        self.waited = compat.plain_variable(0.0, tf.float64)  # seconds, for batches

    def get_next(self) -> Nest:
        """Returns the running step's batch in the step's graph, and adds up the wait for it."""
        with tf.device("/CPU:0"):
            asked = tf.timestamp()
            with tf.control_dependencies([asked]):
                batch = super().get_next()
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                self.waited.assign_add(tf.timestamp() - asked)
        return batch
