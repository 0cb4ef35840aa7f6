"""Source of an object with ``__len__`` and ``__getitem__`` whose items are samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import tensorflow as tf
from keras.utils import PyDataset

from lbbsp_core.order import Indices
from lbbsp_tf.compat import Array, Nest
from lbbsp_tf.data.source import Draw, Fingerprints, Source, as_type, spec_of, string_bytes, type_of


class Items(Source):
    """Source of single samples.

    PyTorch's map-style data sets, those of Hugging Face and the sources of grain are such objects.
    ``__getitems__(indices)``, which reads a list of samples, is used where the object has it.

    Args:
        items: The object. A sample is an array or a number, or a tuple or dict of these.
        readers: Number of threads that read samples.
        any_length: Whether vectors may have different lengths, even if some samples do not.
    """

    def __init__(self, items: Sequence[Nest], readers: int = 1, any_length: bool = False) -> None:
        self.num_samples = len(items)
        if not self.num_samples:
            raise ValueError(f"{type(items).__name__} has no samples: its length is 0")
        self._items, self._readers = items, readers
        self._pool = ThreadPoolExecutor(readers, "lbbsp-reader") if readers > 1 else None
        probes = np.unique(np.linspace(0, self.num_samples - 1, 8).astype(np.int64))
        first, *_ = samples = self._get(probes)
        self._sample = self.structure = as_sample(first)
        self._types = list(map(type_of, tf.nest.flatten(self._sample)))
        leaves = zip(*map(self._leaves, samples, probes), strict=True)
        self._shapes = [_common_shape({leaf.shape for leaf in part}, any_length) for part in leaves]
        self.specs = [
            tf.TensorSpec([None, *shape], kind)
            for shape, kind in zip(self._shapes, self._types, strict=True)
        ]
        if any(None in shape for shape in self._shapes):
            self.specs += [tf.TensorSpec([None, len(shape)], tf.int64) for shape in self._shapes]
            self.structure = tuple(self.specs)
            self.restore = self._crop

    def rows(self, index: Indices) -> list[Array]:
        """Returns leaves of samples, stacked; then their shapes, if these vary."""
        samples = list(zip(*map(self._leaves, self._get(index), index), strict=True))
        rows = [
            _stacked(leaves, index, shape)
            for leaves, shape in zip(samples, self._shapes, strict=True)
        ]
        if self.restore is not None:
            rows += [np.array([leaf.shape for leaf in leaves], np.int64) for leaves in samples]
        return rows

    def _get(self, index: Indices) -> list[Nest]:
        numbers = index.tolist()
        together = getattr(self._items, "__getitems__", None)
        if self._pool is None:
            return together(numbers) if together else [self._items[i] for i in numbers]
        if together:
            chunks = [part.tolist() for part in np.array_split(index, self._readers) if len(part)]
            return [sample for part in self._pool.map(together, chunks) for sample in part]
        return list(self._pool.map(self._items.__getitem__, numbers))

    def _leaves(self, item: Nest, number: int) -> list[Array]:
        """Returns the leaves of a sample, in the data types of the first one."""
        try:
            sample = as_sample(item)
            tf.nest.assert_same_structure(self._sample, sample)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"sample {number} of {type(self._items).__name__} cannot be read: {error}"
            ) from error
        try:
            return list(map(as_type, tf.nest.flatten(sample), self._types))
        except TypeError as error:
            raise ValueError(
                f"sample {number} has another data type than sample 0: let __getitem__ return "
                f"values of one type, such as float(label) ({error})"
            ) from error

    def _crop(self, *leaves: tf.Tensor) -> Nest:
        """Removes the padding from a sample."""
        count = len(self._shapes)
        cropped = [
            tf.ensure_shape(tf.slice(value, tf.zeros_like(size), size), shape)
            for value, size, shape in zip(leaves[:count], leaves[count:], self._shapes, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._sample, cropped)


def as_sample(value: Nest) -> Nest:
    """Converts a sample to a nest of arrays: tuples and dicts of them; lists are arrays."""
    if isinstance(value, Mapping):
        return {key: as_sample(part) for key, part in value.items()}
    if isinstance(value, tuple) or (isinstance(value, list) and any(map(_is_array, value))):
        return tuple(map(as_sample, value))
    if value is None:
        raise ValueError("samples must be arrays, numbers or strings, got None: fill it in")
    return string_bytes(np.asarray(value))


def _is_array(value: object) -> bool:
    return hasattr(value, "__array__") or isinstance(value, (tuple, Mapping))


def _common_shape(shapes: set[tuple[int, ...]], any_length: bool) -> tuple[int | None, ...]:
    """Returns the shape of leaves whose dimensions may differ."""
    if len({len(shape) for shape in shapes}) != 1:
        raise ValueError(f"samples must have the same number of axes, got shapes {sorted(shapes)}")
    sizes = [set(lengths) for lengths in zip(*shapes, strict=True)]
    if any_length and len(sizes) == 1:
        return (None,)
    return tuple(lengths.pop() if len(lengths) == 1 else None for lengths in sizes)


def _stacked(leaves: Sequence[Array], index: Indices, shape: tuple[int | None, ...]) -> Array:
    """Stacks leaves; those of any length are padded to the longest by zeros or empty strings."""
    if None in shape:
        longest = np.max([leaf.shape for leaf in leaves], axis=0)
        padding = b"" if leaves[0].dtype == object else 0
        stacked = np.full([len(leaves), *longest], padding, leaves[0].dtype)
        for place, leaf in enumerate(leaves):
            stacked[place][tuple(map(slice, leaf.shape))] = leaf
        return stacked
    for number, leaf in zip(index, leaves, strict=True):
        if leaf.shape != shape:
            raise ValueError(
                f"sample {number} has shape {leaf.shape}, others have {shape}: let "
                "__getitem__ return arrays of the same shape, or pass padded=True to "
                "balancer.dataset(...) for vectors of any length"
            )
    return np.stack(leaves)


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
        self.records: Fingerprints = Fingerprints()
        self.structure = first = as_batch(batches[0])
        last = as_batch(batches[number - 1]) if number > 1 else first
        self.specs = list(map(spec_of, tf.nest.flatten(first)))
        last_size = len(tf.nest.flatten(last)[0])
        if number > 1:
            self._check_size(0, first, global_batch_size)
        if last_size > global_batch_size:
            self._check_size(number - 1, last, global_batch_size)
        self.num_samples = (number - 1) * global_batch_size + last_size
        # Whether the data set does something between passes.
        self._has_hooks = any(
            getattr(type(batches), hook) is not getattr(PyDataset, hook)
            for hook in ("on_epoch_begin", "on_epoch_end")
        )

    def read(self, draw: Draw) -> list[Array]:
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

    def rows(self, index: Indices) -> list[Array]:
        """Returns rows of the first item, which is not read again."""
        return self._rows(self.structure, index)

    def _rows(self, batch: Nest, samples: Indices) -> list[Array]:
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
        self._check_size(number, batch, min(self._size, self.num_samples - number * self._size))
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
        return {key: as_batch(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(as_batch(part) for part in value if part is not None)
    return string_bytes(np.asarray(value))


def _excerpt(leaf: Array) -> bytes:
    """Returns at most about a thousand values of each row, by which reads are compared."""
    rows = leaf.reshape(len(leaf), leaf.size // len(leaf))
    part = rows[:, :: max(1, rows.shape[1] // 1024)]
    return repr(part.tolist()).encode() if part.dtype == object else part.tobytes()
