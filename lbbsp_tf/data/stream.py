"""Source of records in sequence: a `tf.data.Dataset`, of which each worker keeps its own rows."""

from __future__ import annotations

import weakref
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config

from lbbsp_core.order import Indices
from lbbsp_tf import compat
from lbbsp_tf.compat import Array, Nest
from lbbsp_tf.data.mapping import unpacked
from lbbsp_tf.data.source import Draw, Fingerprints, Source
from lbbsp_tf.rows import count_rows, first_leaf, slice_rows


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
        # The garbage collector stops iterators, perhaps on a thread that is tracing a graph: an
        # operation added to that graph would wait for its lock, which the thread holds, forever.
        with tf.init_scope(), tf.device("/CPU:0"):
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
        if config.is_op_determinism_enabled():  # which forbids to read the clock
            return super().get_next()
        with tf.device("/CPU:0"):
            start = tf.timestamp()
            with tf.control_dependencies([start]):
                batch = super().get_next()
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                self.waited.assign_add(tf.timestamp() - start)
        return batch


class _Records(NamedTuple):
    """Global batch of a pass."""

    position: tf.Tensor  # number of the batch in its pass, an int64 scalar
    may_be_last: tf.Tensor  # whether none follows, or the number of samples is known for certain
    batch: Nest
    fingerprint: tf.Tensor  # of the records, uint8


class Stream(Source):
    """Source of a `tf.data.Dataset`, whose records every worker reads in the same order.

    Each process reads all raw records, once for all of its replicas. These keep their own rows: the
    functions of samples and batches that the balancer applies see only them. An endless data set
    starts with each fit.

    Args:
        dataset: The data set.
        global_batch_size: X, samples per step over all workers.
        num_samples: As in `LoadBalancer.dataset`, like the next two.
        batched: Whether elements are batches.
        steps_per_epoch: Steps of an epoch.
    """

    is_sequential = True

    def __init__(
        self,
        dataset: tf.data.Dataset,
        global_batch_size: int,
        *,
        num_samples: int | None,
        batched: bool | None,
        steps_per_epoch: int | None,
    ) -> None:
        _refuse_nested(dataset)
        self._size = global_batch_size
        self._batched = is_batched(dataset) if batched is None else batched
        self._endless = int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
        counted, is_certain = count_samples(dataset, self._batched)
        if self._endless:
            if num_samples is not None or steps_per_epoch is None:
                raise ValueError(
                    "the tf.data.Dataset is endless: pass steps_per_epoch= and no num_samples= to "
                    "balancer.dataset(...), or leave out repeat()"
                )
            num_samples = steps_per_epoch * global_batch_size
        elif num_samples is None:
            num_samples = counted
        if num_samples is None:
            raise ValueError(
                "the number of samples of the tf.data.Dataset is unknown: pass num_samples= to "
                "balancer.dataset(...)"
            )
        self.num_samples = num_samples
        self._is_counted = is_certain and counted == self.num_samples
        in_order = tf.data.Options()
        in_order.deterministic = True  # all workers must read the same order
        in_order.autotune.enabled = False  # its thread may keep an iterator from being stopped
        in_order.experimental_optimization.inject_prefetch = False  # it opens the next pass early
        in_order.experimental_optimization.apply_default_optimizations = False
        self._dataset = dataset.with_options(in_order)
        self.records: Fingerprints = Fingerprints()
        spec = tf.nest.flatten(dataset.element_spec)
        shapes = [leaf.shape[1:] if self._batched else leaf.shape for leaf in spec]
        # Then what a pass holds depends on all that was read before, and cannot be continued.
        self.is_reshuffled = self._endless or _is_reshuffled(dataset)
        self._varies = not all(shape.is_fully_defined() for shape in shapes)
        self._dense = all(isinstance(leaf, tf.TensorSpec) for leaf in spec)
        self.restore = unpacked(dataset.element_spec) if self._varies and self._dense else None
        passes = self._passes()
        self.structure = passes.element_spec.batch
        self.specs = tf.nest.flatten(self.structure, expand_composites=True)
        self._reader = SwitchingIterator(passes.element_spec)
        weakref.finalize(self, self._reader.stop)
        self._at: int | None = None  # step whose batch the reader gives next
        self._ahead: _Records | None = None  # read, but not given yet

    def read(self, draw: Draw) -> list[Array]:
        """Reads the records of a step, and returns this worker's rows."""
        with tf.device("/CPU:0"):
            return self._rows(draw.once(partial(self._read_batch, draw)), draw.samples)

    def rows(self, index: Indices) -> list[Array]:
        """Returns rows of the first global batch, which the first pass gives once more."""
        return self._rows(self._first, index)

    def _rows(self, batch: Nest, samples: Indices) -> list[Array]:
        first, last = (int(number) % self._size for number in samples[[0, -1]])
        kept = tf.nest.map_structure(lambda leaf: slice_rows(leaf, first, last + 1), batch)
        return [leaf.numpy() for leaf in tf.nest.flatten(kept, expand_composites=True)]

    @cached_property
    def _first(self) -> Nest:
        self._open(0)
        self._ahead = self._next()
        return self._ahead.batch

    def _read_batch(self, draw: Draw) -> Nest:
        """Returns the global batch of a step, which is checked and recorded.

        A data set that is reshuffled has another order whenever it is opened. So each pass is
        opened once, when its first batch is due, however many iterators follow each other.
        """
        place = 0 if self._endless else draw.place
        if draw.step != self._at and (place or self._ahead is None):
            self._open(place)
        records, self._ahead, self._at = self._ahead or self._next(), None, draw.step + 1
        if not self._endless:
            self._check(draw.place * self._size, records)
        self.records.add(draw.step, records.fingerprint.numpy().tobytes())
        return records.batch

    def _open(self, place: int) -> None:
        """Opens the passes, from a global batch of the first one on."""
        passes = self._passes()
        self._reader.start(passes.skip(place).concatenate(passes.repeat()))
        self._ahead = None

    def _next(self) -> _Records:
        return _Records(*self._reader.get_next())

    def close(self) -> None:
        """Ends the last pass of a fit, because the next fit opens the data set again."""
        self._reader.stop()
        self._at = self._ahead = None

    def _passes(self) -> tf.data.Dataset:
        """Returns the `_Records` of a pass over the data."""
        numbered = self._global_batches().enumerate()
        if self._endless or self._is_counted:
            return numbered.map(lambda at, batch: _Records(at, True, batch, _fingerprint(batch)))

        def with_next(positions: tf.data.Dataset, batches: Nest) -> _Records:
            both = tf.data.Dataset.zip((positions, batches)).take(1)
            count = positions.reduce(np.int64(0), lambda count, _: count + 1)
            position, batch = both.get_single_element()
            return _Records(position, count == 1, batch, _fingerprint(batch))

        return numbered.window(2, shift=1).map(with_next)

    def _global_batches(self) -> tf.data.Dataset:
        if self._batched and self._dense and not self._varies:
            return self._dataset.rebatch(self._size)
        samples = self._dataset.unbatch() if self._batched else self._dataset
        if self.restore is not None:
            return samples.ragged_batch(self._size)
        return samples.batch(self._size)

    def _check(self, start: int, records: _Records) -> None:
        """Checks a global batch whose first sample must be `start`."""
        expected = min(self._size, self.num_samples - start)
        place, rows = int(records.position) * self._size, int(count_rows(first_leaf(records.batch)))
        if place < start or rows < expected:
            count = start + (rows if place == start else 0)
            raise ValueError(
                f"the tf.data.Dataset ended after {count} of {self.num_samples} samples: "
                "pass the right num_samples= to balancer.dataset(...)"
            )
        is_last = start + expected == self.num_samples
        if place > start or rows > expected or (is_last and not records.may_be_last):
            raise ValueError(
                f"the tf.data.Dataset has more than {self.num_samples} samples: pass the right "
                "num_samples= to balancer.dataset(...), or leave samples out by take(...)"
            )


def is_batched(dataset: tf.data.Dataset) -> bool:
    """Returns whether the elements of a data set are batches of samples, if that can be told."""
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    has_scalars = any(shape.rank == 0 for shape in shapes)
    sizes = {shape[0] for shape in shapes if shape.rank != 0}
    is_batched = _says_batched(dataset)
    if is_batched is False or (is_batched is None and (has_scalars or len(sizes) > 1)):
        return False
    if is_batched and not has_scalars and len(sizes - {None}) <= 1:
        return True
    raise ValueError(
        f"it is not clear whether the elements of the tf.data.Dataset, {dataset.element_spec}, are "
        "samples or batches: pass batched=False or batched=True to balancer.dataset(...)"
    )


def count_samples(dataset: tf.data.Dataset, batched: bool) -> tuple[int | None, bool]:
    """Returns the number of samples of a data set, or None, and whether it is certain.

    It is not certain behind functions of batches, which may change the number of their samples.
    """
    elements = int(dataset.cardinality())
    if elements < 0:
        return None, False
    size = tf.nest.flatten(dataset.element_spec)[0].shape[0] if batched else 1
    return _count_batched(dataset, elements) if size is None else (elements * size, True)


def _count_batched(dataset: tf.data.Dataset, batches: int) -> tuple[int | None, bool]:
    """Returns what `count_samples` returns of a data set that has `batches` elements."""
    name, inputs = type(dataset).__name__, dataset._inputs()
    if int(dataset.cardinality()) != batches:
        return None, False
    if "Batch" in name:
        size = int(inputs[0].cardinality())
        return (size, True) if size >= 0 else (None, False)
    counts = {_count_batched(source, batches) for source in inputs}
    if len(counts) != 1 or (len(inputs) > 1 and name != "_ZipDataset"):
        return None, False
    (counted, is_certain), *_ = counts
    return counted, is_certain and "Map" not in name and "Scan" not in name


_OF_SAMPLES = ("_TensorSliceDataset", "_RangeDataset")
_OF_OTHER_ELEMENTS = ("_FlatMapDataset", "_InterleaveDataset", "_ParallelInterleaveDataset",
                      "_GroupByWindowDataset", "_WindowDataset")  # fmt: skip


def _says_batched(dataset: tf.data.Dataset) -> bool | None:
    """Returns whether the operations of a data set make batches; None if they do not tell."""
    name, inputs = type(dataset).__name__, dataset._inputs()
    if "Unbatch" in name or name in _OF_SAMPLES:
        return False
    if "Batch" in name:
        return True
    if name in _OF_OTHER_ELEMENTS:
        return None
    if name == "_DirectedInterleaveDataset":
        inputs = inputs[1:]  # the first one selects among the others
    answers = {_says_batched(source) for source in inputs}
    return answers.pop() if len(answers) == 1 else None


def _is_reshuffled(dataset: tf.data.Dataset) -> bool:
    """Returns whether a data set has a new order in each pass."""
    setting = getattr(dataset, "_reshuffle_each_iteration", False)
    return bool(setting) or any(_is_reshuffled(source) for source in dataset._inputs())


def _refuse_nested(dataset: tf.data.Dataset) -> None:
    """Raises an error for elements that are data sets themselves."""
    specs = tf.nest.flatten(dataset.element_spec)
    if any(isinstance(spec, tf.data.DatasetSpec) for spec in specs):
        raise ValueError(
            f"elements of the tf.data.Dataset must be tensors, got {dataset.element_spec}: call "
            "flat_map(...) after window(...), as in flat_map(lambda window: window.batch(size))"
        )


def _fingerprint(batch: Nest) -> tf.Tensor:
    """Returns a fingerprint of at most about a thousand values of each row, uint8."""
    parts = []
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.RaggedTensor):
            leaf = leaf.flat_values
        elif isinstance(leaf, tf.SparseTensor):
            leaf = leaf.values
        size = tf.size(leaf)
        count = tf.minimum(tf.shape(leaf)[0], size)  # rows may have no values
        width = tf.maximum(size // tf.maximum(count, 1), 1)
        rows = tf.reshape(leaf, [count, width])[:, :: tf.maximum(1, width // 1024)]
        parts.append(tf.reshape(tf.fingerprint(rows), [-1]))
    return tf.concat(parts, 0)
