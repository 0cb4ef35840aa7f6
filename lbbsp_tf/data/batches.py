"""Source of a `keras.utils.PyDataset`, whose items are global batches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import tensorflow as tf
from keras.utils import PyDataset

from lbbsp_core.order import Indices
from lbbsp_tf.compat import Nest
from lbbsp_tf.data.source import Draw, Fingerprints, Source, as_type, spec_of, string_bytes


class Batches(Source):
    """Source of global batches.

    Every process reads the whole item, once for all of its replicas, and these keep their own rows.
    The order of the items is shuffled, except that a short last one stays last.

    Args:
        batches: The data set.
        global_batch_size: X, the samples of each item except the last.
    """

    by_batch = True

    def __init__(self, batches: PyDataset, global_batch_size: int) -> None:
        number = getattr(batches, "num_batches", None)
        if number is None:
            raise ValueError(
                f"{type(batches).__name__} is endless: define __len__, or pass a tf.data.Dataset"
            )
        self._batches, self._size = batches, global_batch_size
        self._pass = -1
        self.records = Fingerprints()
        self.structure = first = as_batch(batches[0])
        last = as_batch(batches[number - 1]) if number > 1 else first
        self.specs = list(map(spec_of, tf.nest.flatten(first)))
        rest = len(tf.nest.flatten(last)[0])
        if number > 1:
            self._check_size(0, first, global_batch_size)
        if rest > global_batch_size:
            self._check_size(number - 1, last, global_batch_size)
        self.num_samples = (number - 1) * global_batch_size + rest
        # Whether the data set does something between passes.
        self._has_hooks = any(
            getattr(type(batches), hook) is not getattr(PyDataset, hook)
            for hook in ("on_epoch_begin", "on_epoch_end")
        )

    def read(self, draw: Draw) -> list[np.ndarray]:
        """Reads an item, and returns this worker's rows."""
        number = int(draw.samples[0]) // self._size
        batch = draw.once(partial(self._read_item, draw, number))
        try:
            return self._rows(batch, draw.samples)
        except TypeError as error:
            raise ValueError(
                f"item {number} of {type(self._batches).__name__} has another data type than "
                f"item 0: convert the values to one type ({error})"
            ) from error

    def rows(self, index: Indices) -> list[np.ndarray]:
        """Returns rows of the first item, which is not read again."""
        return self._rows(self.structure, index)

    def _rows(self, batch: Nest, samples: Indices) -> list[np.ndarray]:
        leaves = zip(tf.nest.flatten(batch), self.specs, strict=True)
        return [as_type(leaf[samples % self._size], spec.dtype) for leaf, spec in leaves]

    def continue_at(self, number: int) -> None:
        """Begins the next fit with pass `number`."""
        self._pass = number - 1

    def close(self) -> None:
        """Ends the last pass of a fit."""
        self._batches.on_epoch_end()

    def _read_item(self, draw: Draw, number: int) -> Nest:
        self._begin_pass(draw.number_of_pass)
        batch = as_batch(self._batches[number])
        expected = min(self._size, self.num_samples - number * self._size)
        self._check_size(number, batch, expected)
        tf.nest.assert_same_structure(self.structure, batch)
        self.records.add(draw.step, b"".join(map(_excerpt, tf.nest.flatten(batch))))
        return batch

    def _begin_pass(self, number: int) -> None:
        """Calls the hooks with which a data set may change its items, as Keras does."""
        if number == self._pass:
            return
        if number < self._pass and self._has_hooks:
            raise ValueError(
                f"pass {number} over {type(self._batches).__name__} continues after items of pass "
                f"{self._pass} have been read ahead, and its on_epoch_end may have changed the "
                "items: pass prefetch=0 to balancer.dataset(...)"
            )
        # A training that continues in a later pass needs the items of that pass.
        for _ in range(max(1, number - self._pass)):
            self._batches.on_epoch_end()  # also before the first pass
            self._batches.on_epoch_begin()
        self._pass = number

    def _check_size(self, number: int, batch: Nest, expected: int) -> None:
        sizes = {len(leaf) for leaf in tf.nest.flatten(batch)}
        if sizes != {expected}:
            raise ValueError(
                f"item {number} of {type(self._batches).__name__} must be a global batch of "
                f"{expected} samples, got {sorted(sizes)}: let its items have global_batch_size = "
                f"{self._size} samples, or pass an object whose items are samples"
            )


def as_batch(value: Nest) -> Nest:
    """Converts an item of a `PyDataset` to a nest of arrays; lists are tuples."""
    if isinstance(value, Mapping):
        return {key: as_batch(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(as_batch(each) for each in value if each is not None)
    return string_bytes(np.asarray(value))


def _excerpt(leaf: np.ndarray) -> bytes:
    """Returns at most about a thousand values of each row, by which reads are compared."""
    rows = leaf.reshape(len(leaf), leaf.size // len(leaf))
    part = rows[:, :: max(1, rows.shape[1] // 1024)]
    return repr(part.tolist()).encode() if part.dtype == object else part.tobytes()
