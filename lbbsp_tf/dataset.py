"""Draws: each step takes the samples that its plan gives to this worker.

TensorFlow's distributed iterators fetch batches ahead on their own threads, before the plan of
the step is decided. So `fit` iterates under a strategy over *placeholders*, one sample each, that
only show Keras the structure of the data; the step itself pulls its batch from a local pipeline,
at the moment it starts. Nothing ever waits for a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.input_lib import DistributedDatasetsFromFunction

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.session import WorkerSession

Nest: TypeAlias = object
"""A nest of tensors or arrays: what Keras calls ``(x, y, sample_weight)``."""


class PlannedPipeline:
    """Samples of one `LoadBalancer.dataset`, drawn by the plan.

    Args:
        session: Knows the plans.
        order: Samples of each step.
        arrays: Nest of arrays, equal first axes.
        sample_map: Applied to each sample's tensors, like `tf.data.Dataset.map`, or None.
        batch_map: Applied to each batch (class weights), or None.
    """

    def __init__(
        self,
        session: WorkerSession,
        order: GlobalOrder,
        arrays: Nest,
        sample_map: Callable[..., Nest] | None = None,
        batch_map: Callable[..., Nest] | None = None,
    ) -> None:
        self._session = session
        self.order = order
        with tf.device("/CPU:0"):
            self._arrays = keras.tree.map_structure(tf.constant, arrays)
        self._sample_map = sample_map
        self._batch_map = batch_map
        self._iterator: Iterator[Nest] | None = None
        self._next = 0

    def batches(self) -> tf.data.Dataset:
        """Returns this worker's batches from the running step on.

        Python is called for each step's indices by a stateless function: a generator would be
        finalised when TensorFlow drops an iterator, on a thread that may wait for Python's lock.
        """
        indices = tf.data.Dataset.counter().map(self._draw_in_graph)
        return self._gather(indices).with_options(_without_prefetch())

    def next_batch(self) -> Nest:
        """Returns the running step's batch, as tensors in the step's graph."""
        if self._iterator is None:
            with tf.init_scope(), tf.device("/CPU:0"):
                self._iterator = iter(self.batches())
        with tf.device("/CPU:0"):
            return self._iterator.get_next()

    def placeholders(
        self, strategy: tf.distribute.Strategy, on_iterate: Callable[[PlannedPipeline], None]
    ) -> PlaceholderDataset:
        """Returns what `fit` iterates over: endless batches of one sample.

        Args:
            strategy: The workers' strategy.
            on_iterate: Called with this pipeline whenever an iterator of it starts.
        """
        first = tf.constant([0], tf.int64)
        with tf.device("/CPU:0"):
            sample = next(iter(self._gather(tf.data.Dataset.from_tensors(first))))
        endless = tf.data.Dataset.from_tensors(sample).repeat()
        distributed = strategy.distribute_datasets_from_function(lambda context: endless)
        return PlaceholderDataset(
            distributed,
            on_iterate=lambda: on_iterate(self),
            mapped=lambda f: self._with_batch_map(f).placeholders(strategy, on_iterate),
        )

    def _with_batch_map(self, batch_map: Callable[..., Nest]) -> PlannedPipeline:
        return PlannedPipeline(self._session, self.order, self._arrays, self._sample_map, batch_map)

    def _draw_in_graph(self, number: tf.Tensor) -> tf.Tensor:
        index = tf.numpy_function(self._draw, [number], tf.int64)
        index.set_shape((None,))
        return index

    def _draw(self, number: int) -> np.ndarray:
        """Returns the indices of an iterator's `number`-th batch, int64, shape ``(batch,)``."""
        if number == 0:
            self._session.use_order(self.order)
            self._next = 0
        self._next = max(self._next, self._session.step)  # a fit may skip ahead to its epoch
        index = self._session.local_indices(self._next)
        self._next += 1
        return index

    def _gather(self, indices: tf.data.Dataset) -> tf.data.Dataset:
        data = indices.map(
            lambda index: keras.tree.map_structure(lambda t: tf.gather(t, index), self._arrays)
        )
        if self._sample_map is not None:
            data = data.map(_over_samples(self._arrays, self._sample_map))
        return data if self._batch_map is None else data.map(self._batch_map)


class PlaceholderDataset(DistributedDatasetsFromFunction):
    """Distributed data set that reports when it is iterated, and takes class weights.

    Keras applies class weights by ``data.map(f).prefetch(n)``, which `tf.data` has and
    TensorFlow's own distributed data sets have not. It knows data sets by TensorFlow's classes,
    so this is one of them.

    Args:
        distributed: The data set to stand for.
        on_iterate: Called whenever an iterator starts.
        mapped: Makes the placeholders of the same data with a batch-wise map.
    """

    def __init__(
        self,
        distributed: DistributedDatasetsFromFunction,
        on_iterate: Callable[[], None],
        mapped: Callable[[Callable[..., Nest]], PlaceholderDataset],
    ) -> None:
        vars(self).update(vars(distributed))
        self._on_iterate = on_iterate
        self.map = mapped

    def __iter__(self) -> Iterator[Nest]:
        self._on_iterate()
        return super().__iter__()

    def prefetch(self, count: int) -> PlaceholderDataset:
        """Returns itself: there is nothing to fetch ahead."""
        return self


def pack_arrays(x: Nest, y: Nest, sample_weight: Nest) -> Nest:
    """Packs arrays as Keras does: a nest of NumPy arrays of equal length, floats as floatx.

    Raises:
        ValueError: No arrays, or arrays of different lengths.
    """
    # Tuples, as Keras's own adapters do: tf.data would stack a list into one tensor.
    packed = keras.tree.lists_to_tuples(keras.utils.pack_x_y_sample_weight(x, y, sample_weight))
    arrays = keras.tree.map_structure(_as_array, packed)
    lengths = {len(array) for array in keras.tree.flatten(arrays)}
    if len(lengths) != 1:
        shapes = [array.shape for array in keras.tree.flatten(arrays)]
        raise ValueError(
            f"x, y and sample_weight must have the same number of samples, got shapes {shapes}"
        )
    return arrays


def _without_prefetch() -> tf.data.Options:
    """Keeps TensorFlow from adding prefetches and parallel maps, which would draw ahead."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.inject_prefetch = False
    return options


def _over_samples(tensors: Nest, sample_map: Callable[..., Nest]) -> Callable[..., Nest]:
    """Applies `sample_map` over the first axis of a batch."""
    spec = tf.data.Dataset.from_tensor_slices(tensors).map(sample_map).element_spec
    unpacked = isinstance(tensors, tuple)
    one = (lambda sample: sample_map(*sample)) if unpacked else sample_map

    def over_batch(*batch: Nest) -> Nest:
        return tf.map_fn(one, batch if unpacked else batch[0], fn_output_signature=spec)

    return over_batch


def _as_array(values: object) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim == 0:
        raise ValueError(f"the data must be arrays with a first axis of samples, got {values!r}")
    return array.astype(keras.backend.floatx()) if array.dtype.kind == "f" else array
