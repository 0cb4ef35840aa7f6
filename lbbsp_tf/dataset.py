"""Draw: takes the samples that the plan of each step gives to this worker.

TensorFlow's distributed iterators prefetch batches on background threads, before the plan of the
step is decided. Under a strategy `fit` therefore iterates over *placeholders* of one sample each,
from which Keras learns only the structure of the data. The step itself draws its batch from a
local pipeline when it starts, so that no thread has to wait for a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.input_lib import DistributedDatasetsFromFunction

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.session import WorkerSession
from lbbsp_tf.compat import Nest


class PlannedPipeline:
    """Samples of one `LoadBalancer.dataset`, drawn by the plans.

    Args:
        session: Session with the plans.
        order: Samples of each step.
        arrays: Nest of arrays of the same length.
        sample_map: Function of each sample's tensors, as for `tf.data.Dataset.map`, or None.
        batch_map: Function of each batch, such as Keras's class weights, or None.
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

        The indices come from a stateless Python function. A generator would be finalised when
        TensorFlow deletes the iterator, on a thread that may then wait for Python's GIL.
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

    def first_samples(self, count: int) -> Nest:
        """Returns the first samples of the running step's global batch, the same on all workers."""
        index = tf.constant(self.order.indices(0)[:count], tf.int64)
        with tf.device("/CPU:0"):
            return next(iter(self._gather(tf.data.Dataset.from_tensors(index))))

    def placeholders(
        self, strategy: tf.distribute.Strategy, on_iterate: Callable[[PlannedPipeline], None]
    ) -> PlaceholderDataset:
        """Returns endless batches of one sample, over which `fit` iterates.

        Args:
            strategy: Strategy of the workers.
            on_iterate: Called with this pipeline whenever an iteration starts.
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
        self._next = max(self._next, self._session.step)  # a fit may start at a later epoch
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
    """Distributed data set that reports the start of an iteration, and supports class weights.

    Keras applies class weights by ``data.map(f).prefetch(n)``, methods that TensorFlow's
    distributed data sets lack. It recognises data sets by TensorFlow's classes, so this is a
    subclass of one.

    Args:
        distributed: Data set to wrap.
        on_iterate: Called whenever an iteration starts.
        mapped: Creates the placeholders of the same data with a function of each batch.
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
        """Returns the data set itself, since placeholders need no prefetching."""
        return self


def pack_arrays(x: Nest, y: Nest, sample_weight: Nest) -> Nest:
    """Packs the data as Keras does: a nest of NumPy arrays of the same length, floats as floatx.

    Raises:
        ValueError: A value is not an array, or lengths differ.
    """
    # Lists become tuples, as in Keras's own adapters: tf.data would stack a list into one tensor.
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
    """Returns options without automatic prefetching and parallel maps, which would draw ahead."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.inject_prefetch = False
    return options


def _over_samples(tensors: Nest, sample_map: Callable[..., Nest]) -> Callable[..., Nest]:
    """Returns a function that applies `sample_map` over the first axis of a batch."""
    spec = tf.data.Dataset.from_tensor_slices(tensors).map(sample_map).element_spec
    unpacked = isinstance(tensors, tuple)
    one = (lambda sample: sample_map(*sample)) if unpacked else sample_map

    def over_batch(*batch: Nest) -> Nest:
        return tf.map_fn(one, batch if unpacked else batch[0], fn_output_signature=spec)

    return over_batch


def _as_array(values: object) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim == 0:
        raise ValueError(
            f"the data must be arrays whose first axis is that of samples, got {values!r}: pass "
            "one array per input"
        )
    return array.astype(keras.backend.floatx()) if array.dtype.kind == "f" else array
