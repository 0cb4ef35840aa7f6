"""Source of an object with ``__len__`` and ``__getitem__`` whose items are samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from lbbsp_core.order import Indices
from lbbsp_core.runtime.exchange.digest import Digest, sampled
from lbbsp_tf.compat import Nest
from lbbsp_tf.data.plan import HostCalls, Plan
from lbbsp_tf.data.source import Source, as_spec, digests_of, spec_of, string_bytes

_READ_AGAIN = 8
"""Number of samples that are read twice, to find out whether they change."""


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
        self._items = items
        self._pool = ThreadPoolExecutor(readers, "lbbsp-reader") if readers > 1 else None
        self._readers = readers
        probes = np.unique(np.linspace(0, self.num_samples - 1, 8).astype(np.int64))
        first, *_ = samples = self._get(probes)
        self._structure = as_sample(first)
        self._specs, self._varies = [], []
        for leaves in zip(*map(self._flatten, samples, probes), strict=True):
            spec = _common_spec({leaf.shape for leaf in leaves}, spec_of(leaves[0]).dtype)
            _as_specs(leaves, probes, spec)
            if any_length and spec.shape.rank == 1:
                spec = tf.TensorSpec([None], spec.dtype)
            self._specs.append(spec)
            self._varies.append(not spec.shape.is_fully_defined())
        self.restore = self._crop if any(self._varies) else None

    def batches(self, plan: Plan, host: HostCalls) -> tf.data.Dataset:
        """Returns this worker's batches."""
        pairs = list(zip(self._specs, self._varies, strict=True))
        rows = [tf.TensorSpec([None, *spec.shape], spec.dtype) for spec, _ in pairs]
        rows += [tf.TensorSpec([None, len(s.shape)], tf.int64) for s, varies in pairs if varies]
        return plan.batches(host, lambda _, drawn: self._read(drawn.samples), rows, self._packed)

    def example(self, index: Indices) -> Nest:
        """Returns a batch of samples."""
        return self._packed([tf.constant(values) for values in self._read(index)])

    def read_digests(self) -> list[Digest] | None:
        """Reads some samples, and returns their digests."""
        index = sampled(self.num_samples)
        again = index[:_READ_AGAIN]
        if digests_of(self._read(again)) != digests_of(self._read(again)):
            return None
        # Few at once: samples may be large.
        parts = np.split(index, range(_READ_AGAIN, len(index), _READ_AGAIN))
        return [digest for part in parts for digest in digests_of(self._read(part))]

    def _read(self, index: Indices) -> list[np.ndarray]:
        """Returns leaves of samples, stacked, then the shapes of those that vary."""
        samples = list(map(self._flatten, self._get(index), index))
        stacked, shapes = [], []
        for leaves, spec, varies in zip(
            zip(*samples, strict=True), self._specs, self._varies, strict=True
        ):
            leaves = _as_specs(leaves, index, spec)
            if varies:
                shapes.append(np.array([leaf.shape for leaf in leaves], np.int64))
                leaves = _padded(leaves)
            else:
                _check_shapes(leaves, index, spec)
            stacked.append(np.stack(leaves))
        return stacked + shapes

    def _get(self, index: Indices) -> list[Nest]:
        numbers = index.tolist()
        together = getattr(self._items, "__getitems__", None)
        if self._pool is None:
            return together(numbers) if together else [self._items[i] for i in numbers]
        if together:
            chunks = [part.tolist() for part in np.array_split(index, self._readers) if len(part)]
            return [sample for part in self._pool.map(together, chunks) for sample in part]
        return list(self._pool.map(self._items.__getitem__, numbers))

    def _flatten(self, item: Nest, number: int) -> list[np.ndarray]:
        """Returns the leaves of a sample."""
        try:
            sample = as_sample(item)
            tf.nest.assert_same_structure(self._structure, sample)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"sample {number} of {type(self._items).__name__} cannot be read: {error}"
            ) from error
        return tf.nest.flatten(sample)

    def _packed(self, leaves: list[tf.Tensor]) -> Nest:
        if self.restore is None:
            return tf.nest.pack_sequence_as(self._structure, leaves)
        return tuple(leaves)

    def _crop(self, *leaves: tf.Tensor) -> Nest:
        """Removes the padding from a sample."""
        values, shapes = leaves[: len(self._specs)], iter(leaves[len(self._specs) :])
        cropped = []
        for value, spec, varies in zip(values, self._specs, self._varies, strict=True):
            if varies:
                value = tf.slice(value, tf.zeros(len(spec.shape), tf.int64), next(shapes))
            cropped.append(tf.ensure_shape(value, spec.shape))
        return tf.nest.pack_sequence_as(self._structure, cropped)


def as_sample(value: Nest) -> Nest:
    """Converts a sample to a nest of arrays: tuples and dicts of them; lists are arrays."""
    if isinstance(value, Mapping):
        return {key: as_sample(each) for key, each in value.items()}
    if isinstance(value, tuple) or (isinstance(value, list) and any(map(_is_array, value))):
        return tuple(map(as_sample, value))
    if value is None:
        raise ValueError("samples must be arrays, numbers or strings, got None: fill it in")
    return string_bytes(np.asarray(value))


def _is_array(value: object) -> bool:
    return hasattr(value, "__array__") or isinstance(value, (tuple, Mapping))


def _common_spec(shapes: set[tuple[int, ...]], dtype: tf.DType) -> tf.TensorSpec:
    """Returns the specification of leaves whose dimensions may differ."""
    if len({len(shape) for shape in shapes}) != 1:
        raise ValueError(f"samples must have the same number of axes, got shapes {sorted(shapes)}")
    dimensions = [each.pop() if len(each) == 1 else None for each in map(set, zip(*shapes))]  # noqa: B905
    return tf.TensorSpec(dimensions, dtype)


def _padded(leaves: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Pads arrays to the longest, by zeros or empty strings."""
    longest = np.max([leaf.shape for leaf in leaves], axis=0)
    padded = []
    for leaf in leaves:
        whole = np.full(longest, b"" if leaf.dtype == object else 0, leaf.dtype)
        whole[tuple(map(slice, leaf.shape))] = leaf
        padded.append(whole)
    return padded


def _check_shapes(leaves: Sequence[np.ndarray], index: Indices, spec: tf.TensorSpec) -> None:
    for number, leaf in zip(index, leaves, strict=True):
        if leaf.shape != tuple(spec.shape):
            raise ValueError(
                f"sample {number} has shape {leaf.shape}, others have {tuple(spec.shape)}: let "
                "__getitem__ return arrays of the same shape, or pass padded=True to "
                "balancer.dataset(...) for vectors of any length"
            )


def _as_specs(
    leaves: Iterable[np.ndarray], index: Indices, spec: tf.TensorSpec
) -> list[np.ndarray]:
    """Converts leaves to the data type of the first sample."""
    converted = []
    for leaf, number in zip(leaves, index, strict=True):
        if leaf.dtype != spec.dtype.as_numpy_dtype:
            try:
                leaf = as_spec(leaf, spec)
            except TypeError as error:
                raise ValueError(
                    f"sample {number} has another data type than sample 0: let __getitem__ return "
                    f"values of one type, such as float(label) ({error})"
                ) from error
        converted.append(leaf)
    return converted
