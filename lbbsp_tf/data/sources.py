"""Sources: kinds of training data with random access, one class for each.

A source reads the samples that a plan gives to this worker. Nothing is copied whole: arrays are
indexed, and items read, batch by batch. `stream.py` holds the source that reads records in
sequence.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf
from keras.utils import PyDataset

from lbbsp_core import GlobalOrder
from lbbsp_core.order import Indices
from lbbsp_core.runtime.exchange.digest import Digest, sampled
from lbbsp_core.validate import require_fraction
from lbbsp_tf.compat import Nest
from lbbsp_tf.data.columns import as_native, as_spec, map_columns, spec_of, string_bytes
from lbbsp_tf.data.host import HostCalls
from lbbsp_tf.data.iteration import SharedReads

_READ_AGAIN = 8
"""Number of samples that are read twice, to find out whether they change."""


class Draw(NamedTuple):
    """Samples of this worker in a step.

    Args:
        step: Number of the step, counted from the start of the order.
        samples: Numbers of the samples, int64, shape ``(samples,)``.
    """

    step: int
    samples: Indices


class Plan(Protocol):
    """Plan by which a source is read.

    Args:
        order: Samples of each step.
        reads: What the replicas of this process read together, if there are several; else None.
    """

    order: GlobalOrder
    reads: SharedReads | None

    def first_step(self) -> int:
        """Returns the global step of the first batch; called when an iteration starts."""
        ...

    def draw(self, step: int) -> Draw:
        """Returns this worker's samples of a global step."""
        ...


class Source(Protocol):
    """Training data of all workers, from which each of them reads its own samples.

    Args:
        num_samples: Number of samples of a pass over the data.
        by_batch: Whether the items of the data set are global batches.
        is_sequential: Whether the data can only be read in its own order.
        in_memory: Whether reading takes negligible time.
        restore: Function that makes a sample of an element of `batches`, or None if the batches
            contain the samples as they are.
        records: Fingerprints of what was read, if workers may read different data; else None.
        digests: What `read_digests` has returned the first time.
    """

    num_samples: int
    by_batch: bool
    is_sequential: bool
    in_memory: bool
    restore: Callable[..., Nest] | None
    records: Fingerprints | None
    digests: Sequence[Digest] | None

    def batches(self, plan: Plan, host: HostCalls) -> tf.data.Dataset:
        """Returns this worker's batches.

        Args:
            plan: Samples of this worker in each step.
            host: Calls of Python functions, which live as long as the data set.
        """
        ...

    def example(self, index: Indices) -> Nest:
        """Returns a batch of samples of the first step, in the form of `batches`."""
        ...

    def read_digests(self) -> Sequence[Digest] | None:
        """Reads some samples, and returns a digest for each of their leaves.

        The sources of other workers give the same. None if samples are others when read again.
        """
        ...


class Fingerprints:
    """Running fingerprint of the records that a worker has read, by global step."""

    def __init__(self) -> None:
        self._value = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=1024)

    def add(self, step: int, data: bytes) -> None:
        """Adds the records of a global step, unless they have been read before."""
        if self._recent and step <= self._recent[-1][0]:
            return
        self._value = zlib.crc32(data, self._value)
        self._recent.append((step, self._value))

    def forget_from(self, step: int) -> None:
        """Forgets `step` and later ones, which were read ahead by a fit that has ended."""
        while self._recent and self._recent[-1][0] >= step:
            self._recent.pop()
        self._value = self._recent[-1][1] if self._recent else 0

    def at(self, step: int) -> int:
        """Returns the fingerprint of all records up to those of `step`; 0 if it was not read."""
        return next((value for at, value in reversed(self._recent) if at == step), 0)


class Arrays:
    """Source of in-memory arrays, memory maps, HDF5 data sets, data frames and tensors.

    Args:
        x: Array, or a nest (tuple, list, dict) of arrays, whose first axis is that of samples.
        y: Targets in the same form, or None.
        sample_weight: Array of shape ``(samples,)``, or None.
        validation_split: Fraction of the samples, the last ones, that are not trained on.

    Raises:
        ValueError: A value is not an array, or lengths differ.
    """

    by_batch = is_sequential = False
    restore = records = None

    def __init__(
        self, x: Nest, y: Nest = None, sample_weight: Nest = None, validation_split: float = 0.0
    ) -> None:
        require_fraction("validation_split", validation_split)
        given = {"x": x, "y": y, "sample_weight": sample_weight}
        packed = [
            None if value is None else map_columns(name, value) for name, value in given.items()
        ]
        self._columns = keras.utils.pack_x_y_sample_weight(*packed)
        columns = tf.nest.flatten(self._columns)
        lengths = {len(each) for each in columns}
        if len(lengths) != 1:
            raise ValueError(
                "x, y and sample_weight must have the same number of samples, got shapes "
                f"{[each.shape for each in columns]}: a list of arrays is a list of inputs; for "
                "samples of different length pass tf.ragged.constant(...)"
            )
        (length,) = lengths
        self.in_memory = all(each.in_memory for each in columns)
        self._split = validation_split
        self.given_samples = length  # with those that are kept for validation
        self.num_samples = int(length * (1.0 - validation_split))
        if not self.num_samples:
            raise ValueError(
                f"validation_split = {validation_split} of {length} samples leaves none for "
                "training: lower it"
            )

    @property
    def validation_data(self) -> Nest:
        """Samples that are not trained on, as ``(x, y)`` or ``(x, y, sample_weight)``; or None."""
        if not self._split:
            return None
        rest = tf.nest.map_structure(lambda each: each.tail(self.num_samples), self._columns)
        return rest if isinstance(rest, tuple) else (rest,)

    def batches(self, plan: Plan, host: HostCalls) -> tf.data.Dataset:
        """Returns this worker's batches."""
        index = [tf.TensorSpec([None], tf.int64)]
        draw = lambda step: [plan.draw(int(step)).samples]  # noqa: E731
        return step_numbers(plan, host).map(
            lambda step: self._take(*host.call(draw, [step], index), host)
        )

    def example(self, index: Indices) -> Nest:
        """Returns a batch of samples."""
        return self._take(tf.constant(index), HostCalls())

    def read_digests(self) -> list[Digest]:
        """Reads some samples, and returns their digests."""
        with tf.device("/CPU:0"):
            return digests_of(self.example(sampled(self.num_samples)))

    digests = cached_property(read_digests)

    def _take(self, index: tf.Tensor, host: HostCalls) -> Nest:
        return tf.nest.map_structure(lambda each: each.take(index, host), self._columns)


class Items:
    """Source of an object with ``__len__`` and ``__getitem__`` whose items are samples.

    PyTorch's map-style data sets, those of Hugging Face and the sources of grain are such objects.
    ``__getitems__(indices)``, which reads a list of samples, is used where the object has it.

    Args:
        items: The object. A sample is an array or a number, or a tuple or dict of these.
        readers: Number of threads that read samples.
        any_length: Whether vectors may have different lengths, even if some samples do not.

    Raises:
        ValueError: The object is empty.
    """

    by_batch = is_sequential = in_memory = False
    records = None

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
            shapes = {leaf.shape for leaf in leaves}
            spec = _common_spec(shapes, spec_of(leaves[0]).dtype)
            _as_specs(leaves, probes, spec)
            if any_length and spec.shape.rank == 1:
                spec = tf.TensorSpec([None], spec.dtype)
            self._specs.append(spec)
            self._varies.append(not spec.shape.is_fully_defined())
        self.restore = self._crop if any(self._varies) else None

    def batches(self, plan: Plan, host: HostCalls) -> tf.data.Dataset:
        """Returns this worker's batches."""
        read = lambda step: self._read(plan.draw(int(step)).samples)  # noqa: E731
        return step_numbers(plan, host).map(
            lambda step: self._packed(host.call(read, [step], self._rows))
        )

    def example(self, index: Indices) -> Nest:
        """Returns a batch of samples."""
        return self._packed([tf.constant(values) for values in self._read(index)])

    def read_digests(self) -> list[Digest] | None:
        """Reads some samples, and returns their digests; None if they are others when read again.

        Only a few are read twice.
        """
        index = sampled(self.num_samples)
        again = index[:_READ_AGAIN]
        if digests_of(self._read(again)) != digests_of(self._read(again)):
            return None
        # Few at once: samples may be large.
        parts = np.split(index, range(_READ_AGAIN, len(index), _READ_AGAIN))
        return [digest for part in parts for digest in digests_of(self._read(part))]

    digests = cached_property(read_digests)

    @property
    def _rows(self) -> list[tf.TensorSpec]:
        """Specifications of what `_read` returns."""
        rows = [tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in self._specs]
        shapes = [
            tf.TensorSpec([None, len(spec.shape)], tf.int64)
            for spec, varies in zip(self._specs, self._varies, strict=True)
            if varies
        ]
        return rows + shapes

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


class Batches:
    """Source of a `keras.utils.PyDataset`, whose items are global batches.

    Every process reads the whole item, once for all of its replicas, and these keep their own rows.
    The order of the items is shuffled, except that a short last one stays last.

    Args:
        batches: The data set.
        global_batch_size: X, the samples of each item except the last.

    Raises:
        ValueError: The length is unknown, or an item has another number of samples.
    """

    by_batch = True
    is_sequential = in_memory = False
    restore = None

    def __init__(self, batches: PyDataset, global_batch_size: int) -> None:
        number = getattr(batches, "num_batches", None)
        if number is None:
            raise ValueError(
                f"{type(batches).__name__} is endless: define __len__, or pass a tf.data.Dataset"
            )
        self._batches, self._size = batches, global_batch_size
        self._pass = -1
        self.records = Fingerprints()
        first = as_batch(batches[0])
        last = as_batch(batches[number - 1]) if number > 1 else first
        self._structure = first
        self._specs = [
            tf.TensorSpec([None, *leaf.shape[1:]], spec_of(leaf).dtype)
            for leaf in tf.nest.flatten(first)
        ]
        rest = len(tf.nest.flatten(last)[0])
        if number > 1:
            self._check_size(0, first, global_batch_size)
        if rest > global_batch_size:
            self._check_size(number - 1, last, global_batch_size)
        self.num_samples = (number - 1) * global_batch_size + rest

    def batches(self, plan: Plan, host: HostCalls) -> tf.data.Dataset:
        """Returns this worker's batches."""

        def read(step: int) -> list[np.ndarray]:
            drawn = plan.draw(int(step))
            number = int(drawn.samples[0]) // self._size
            number_of_pass = drawn.step // plan.order.steps_per_pass
            read_item = partial(self._read, int(step), number, number_of_pass)
            leaves = plan.reads.get(int(step), read_item) if plan.reads else read_item()
            rows = drawn.samples - number * self._size
            pairs = zip(leaves, self._specs, strict=True)
            try:
                return [as_spec(leaf[rows], spec) for leaf, spec in pairs]
            except TypeError as error:
                raise ValueError(
                    f"item {number} of {type(self._batches).__name__} has another data type than "
                    f"item 0: convert the values to one type ({error})"
                ) from error

        return step_numbers(plan, host).map(
            lambda step: tf.nest.pack_sequence_as(
                self._structure, host.call(read, [step], self._specs)
            )
        )

    def example(self, index: Indices) -> Nest:
        """Returns a batch of samples of the first item, which is not read again."""
        rows = index % self._size
        return tf.nest.map_structure(
            lambda leaf: tf.constant(as_native(leaf[rows])), self._structure
        )

    def _read(self, step: int, number: int, number_of_pass: int) -> list[np.ndarray]:
        """Returns the leaves of an item, which belongs to a step of a pass."""
        self._begin_pass(number_of_pass)
        batch = as_batch(self._batches[number])
        expected = min(self._size, self.num_samples - number * self._size)
        self._check_size(number, batch, expected)
        tf.nest.assert_same_structure(self._structure, batch)
        leaves = tf.nest.flatten(batch)
        self.records.add(step, b"".join(_excerpt(leaf) for leaf in leaves))
        return leaves

    def continue_at(self, number: int) -> None:
        """Begins the next fit with a pass whose predecessors have been read in this process."""
        self._pass = number - 1

    def close(self) -> None:
        """Ends the last pass of a fit."""
        self._batches.on_epoch_end()

    def _begin_pass(self, number: int) -> None:
        """Calls the hooks with which a data set may change its items, as Keras does.

        Raises:
            ValueError: A later pass has begun already, because its items were read ahead.
        """
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

    @property
    def _has_hooks(self) -> bool:
        """True if the data set does something between passes."""
        kind, base = type(self._batches), PyDataset
        return any(
            getattr(kind, hook) is not getattr(base, hook)
            for hook in ("on_epoch_begin", "on_epoch_end")
        )

    def _check_size(self, number: int, batch: Nest, expected: int) -> None:
        sizes = {len(leaf) for leaf in tf.nest.flatten(batch)}
        if sizes != {expected}:
            raise ValueError(
                f"item {number} of {type(self._batches).__name__} must be a global batch of "
                f"{expected} samples, got {sorted(sizes)}: let its items have global_batch_size = "
                f"{self._size} samples, or pass an object whose items are samples"
            )


def digests_of(samples: Nest) -> list[Digest]:
    """Returns a digest of each sample and leaf of a batch; ragged and sparse leaves have one."""
    digests = []
    for leaf in tf.nest.flatten(samples):
        parts = [np.asarray(part) for part in tf.nest.flatten(leaf, expand_composites=True)]
        numbers = [_as_numbers(part) for part in parts]
        if len(parts) == 1:
            digests += [Digest.of([row]) for row in numbers[0]]
        else:
            digests.append(Digest.of(numbers))
    return digests


def _as_numbers(values: np.ndarray) -> np.ndarray:
    """Replaces texts by their hashes, and complex numbers by pairs."""
    if values.dtype.kind in "OSU":
        hashes = [zlib.crc32(each) for each in string_bytes(values).flat]
        return np.reshape(hashes, values.shape).astype(np.float64)
    return values.view(values.real.dtype) if values.dtype.kind == "c" else values


def open_source(
    x: Nest,
    y: Nest,
    sample_weight: Nest,
    *,
    global_batch_size: int,
    readers: int,
    any_length: bool,
    validation_split: float,
) -> Source:
    """Returns the source of a data set with random access.

    Raises:
        ValueError: The kind of data is not supported; names the remedy.
    """
    _refuse_sequences(x)
    if _is_array_like(x):
        return Arrays(x, y, sample_weight, validation_split)
    kind = type(x).__name__
    if y is not None or sample_weight is not None:
        raise ValueError(
            f"y and sample_weight must be None if x is a {kind}: let its items be (x, y) or "
            "(x, y, sample_weight)"
        )
    if validation_split:
        raise ValueError(
            f"validation_split needs arrays, got a {kind}: split the data set yourself, and pass "
            "fit(..., validation_data=...)"
        )
    if isinstance(x, PyDataset):
        return Batches(x, global_batch_size)
    if hasattr(x, "__len__") and hasattr(x, "__getitem__"):
        return Items(x, readers, any_length)
    raise ValueError(
        f"x must be arrays, a tf.data.Dataset, a keras.utils.PyDataset, or an object with __len__ "
        f"and __getitem__ whose items are samples, got {kind}: for data that can only be iterated "
        "over, use tf.data.Dataset.from_generator(function, output_signature=...)"
    )


def step_numbers(plan: Plan, host: HostCalls) -> tf.data.Dataset:
    """Returns the global steps of an epoch, from the one that is running when it is opened on."""

    def count(_: tf.Tensor) -> tf.data.Dataset:
        scalar = [tf.TensorSpec([], tf.int64)]
        (step,) = host.call(lambda: [np.int64(plan.first_step())], [], scalar)
        return tf.data.Dataset.range(step, step + plan.order.steps_per_epoch)

    return tf.data.Dataset.from_tensors(0).flat_map(count)


def as_sample(value: Nest) -> Nest:
    """Converts a sample to a nest of arrays: tuples and dicts of them; lists are arrays."""
    if isinstance(value, Mapping):
        return {key: as_sample(each) for key, each in value.items()}
    if isinstance(value, tuple) or (isinstance(value, list) and any(map(_is_array, value))):
        return tuple(map(as_sample, value))
    if value is None:
        raise ValueError("samples must be arrays, numbers or strings, got None: fill it in")
    return string_bytes(np.asarray(value))


def as_batch(value: Nest) -> Nest:
    """Converts an item of a `PyDataset` to a nest of arrays; lists are tuples."""
    if isinstance(value, Mapping):
        return {key: as_batch(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(as_batch(each) for each in value if each is not None)
    return string_bytes(np.asarray(value))


def _is_array(value: object) -> bool:
    return hasattr(value, "__array__") or isinstance(value, (tuple, Mapping))


def _is_array_like(x: Nest) -> bool:
    """Returns whether `x` is an array of samples or a nest of such arrays."""
    return isinstance(x, (list, tuple, Mapping, tf.RaggedTensor, tf.SparseTensor)) or (
        hasattr(x, "shape") and hasattr(x, "dtype")
    ) or hasattr(x, "iloc")  # fmt: skip


def _refuse_sequences(x: Nest) -> None:
    """Raises an error for data that only one process could iterate over.

    Raises:
        ValueError: Names the remedy.
    """
    classes = [f"{c.__module__}.{c.__name__}" for c in type(x).__mro__]
    if any(c.startswith("torch.utils.data") and c.endswith(".DataLoader") for c in classes):
        raise ValueError(
            "x must not be a torch DataLoader, whose batches have a fixed size: pass its data set, "
            "loader.dataset, and readers= in place of num_workers="
        )
    if hasattr(x, "__next__") and not hasattr(x, "shape") and not isinstance(x, PyDataset):
        raise ValueError(
            f"x must not be a {type(x).__name__}, which can be read only once: pass "
            "tf.data.Dataset.from_generator(function, output_signature=...)"
        )


def _common_spec(shapes: set[tuple[int, ...]], dtype: tf.DType) -> tf.TensorSpec:
    """Returns the specification of leaves whose dimensions may differ."""
    ranks = {len(shape) for shape in shapes}
    if len(ranks) != 1:
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
    leaves: Sequence[np.ndarray], index: Indices, spec: tf.TensorSpec
) -> list[np.ndarray]:
    """Converts leaves to the data type of the first sample."""
    pairs = zip(leaves, index, strict=True)
    return [
        leaf if leaf.dtype == spec.dtype.as_numpy_dtype else _converted(leaf, number, spec)
        for leaf, number in pairs
    ]


def _converted(leaf: np.ndarray, number: int, spec: tf.TensorSpec) -> np.ndarray:
    try:
        return as_spec(leaf, spec)
    except TypeError as error:
        raise ValueError(
            f"sample {number} has another data type than sample 0: let __getitem__ return values "
            f"of one type, such as float(label) ({error})"
        ) from error


def _excerpt(leaf: np.ndarray) -> bytes:
    """Returns at most about a thousand values of each row, by which reads are compared."""
    rows = leaf.reshape(len(leaf), leaf.size // len(leaf))
    part = rows[:, :: max(1, rows.shape[1] // 1024)]
    return repr(part.tolist()).encode() if part.dtype == object else part.tobytes()
