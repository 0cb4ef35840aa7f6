"""Patches with which evaluation, validation and prediction take any number of rows.

Keras splits each batch into equal parts, and a worker whose part is empty fails (convolutions,
recurrent layers, CTC) or waits for the others indefinitely. Here every worker iterates over the
same global batches and takes its own rows. A worker without rows computes on one row of the batch,
whose result is discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer as Trainer
from keras.src.backend.tensorflow.trainer import TFEpochIterator as Epochs
from keras.src.trainers.epoch_iterator import EpochIterator

from lbbsp_core.runtime.exchange.digest import SAMPLES
from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_tf.activity import current_activity
from lbbsp_tf.cluster import rank_and_workers
from lbbsp_tf.compat.fitting import is_of_keras, is_stock
from lbbsp_tf.compat.metrics import (
    added_vectors_scaled,
    intercepted_scalars,
    is_whole,
    take_whole_batches,
    token_means_scaled,
    whole_batches,
)
from lbbsp_tf.compat.replicas import STRATEGIES, mean_over_replicas, replicas_view
from lbbsp_tf.compat.state import set_last_rows
from lbbsp_tf.compat.tracing import fresh_traces
from lbbsp_tf.compat.values import (
    Method,
    Nest,
    PerThread,
    is_patched,
    local,
    patch,
    patched,
    replaced,
)
from lbbsp_tf.rows import count_rows, first_leaf, slice_rows

Logs = Mapping[str, object]


class Kind(IntEnum):
    """What a scalar that a test step logs is, of the samples of a batch."""

    MEAN = 0
    SUM = 1
    SUM_AND_REGULARISERS = 2
    OTHER = 3


_is_local = PerThread()  # whether `predict_on_batch` is running


class ReplicaRows(NamedTuple):
    """One replica's rows of a global batch."""

    batch: Nest  # one row, to be discarded, if the replica has none
    rows: tf.Tensor  # number; may be 0
    total: tf.Tensor  # rows of the global batch


def patch_evaluation(
    global_logs: Callable[[keras.Model, Logs], Logs],
    check_all_call: Callable[[int], None],
    check_samples: Callable[[list[Nest]], None],
    kinds: Callable[[keras.Model, Nest], Sequence[Kind]],
) -> None:
    """Makes `evaluate`, validation and `predict` equal those of one process.

    `global_logs` is given what a custom `train_step` or `test_step` has logged on this worker,
    `check_all_call` the number of batches (0 if unknown) before they are read, `check_samples` some
    samples that were read, and `kinds` a batch, to tell what the scalars of a `test_step` are, in
    order.
    """
    patch(Epochs, "__init__", partial(_iterate_over_rows, check_all_call))
    patch(Epochs, "catch_stop_iteration", partial(_then_checked, check_samples))
    for name, replacement in (
        ("make_test_function", partial(_make_test_function, kinds)),
        ("make_predict_function", _make_predict_function),
        ("predict_on_batch", _predict_locally),
        ("_get_metrics_result_or_logs", partial(_agree_on_logs, global_logs)),
    ):
        patch(Trainer, name, partial(_if_several, replacement))


class Rows:
    """Rows of this process's replicas in the global batches of a data set.

    It has iterators of its own. Those of TensorFlow's strategies have threads for autotuning, of
    which TensorFlow can lose the cancellation when a busy worker deletes the iterator: a fit would
    end minutes late.
    """

    def __init__(self, dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> None:
        self.element_spec = dataset.element_spec
        self.samples: list[Nest] = []
        rank, workers = rank_and_workers(strategy.cluster_resolver)
        # `predict` orders the rows by place in the worker first, then by worker.
        places = range(rank, strategy.num_replicas_in_sync, workers)
        self._dataset = split_rows(dataset, places, strategy.num_replicas_in_sync)
        self._strategy = strategy

    def __iter__(self) -> Iterator[Nest]:
        self.samples = []
        for batch, *parts in self._dataset:
            if len(self.samples) < SAMPLES:  # many of the first batch, and one of each other
                count = 1 if self.samples else SAMPLES
                leaves = filter(has_rows, tf.nest.flatten(batch))
                self.samples.append([slice_rows(leaf, 0, count) for leaf in leaves])
            if len(parts) == 1:
                yield parts[0]
            else:
                yield self._strategy.experimental_distribute_values_from_function(
                    lambda context: parts[context.replica_id_in_sync_group % len(parts)]  # noqa: B023
                )


def split_rows(dataset: tf.data.Dataset, places: Sequence[int], replicas: int) -> tf.data.Dataset:
    """Returns global batches, each followed by the `ReplicaRows` of some places, see `rows_of`."""
    spec = dataset.element_spec

    def split(*elements: Nest) -> tuple[Nest, ...]:
        batch = tf.nest.pack_sequence_as(spec, tf.nest.flatten(elements))
        return batch, *(rows_of(batch, place, replicas) for place in places)

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.map(split).prefetch(1).with_options(options)


def rows_of(batch: Nest, place: int, replicas: int) -> ReplicaRows:
    """Returns the rows of replica `place`, in [0, replicas), of a batch."""
    leaves = tf.nest.flatten(batch)
    total, *counts = [count_rows(leaf) for leaf in leaves if has_rows(leaf)]
    for other in counts:
        tf.debugging.assert_equal(other, total, "all arrays of a batch must have the same length")
    start, stop = total * place // replicas, total * (place + 1) // replicas
    length = tf.maximum(stop - start, 1)  # if there are none, a row that will be discarded
    cut = [slice_rows(leaf, start, start + length) if has_rows(leaf) else leaf for leaf in leaves]
    return ReplicaRows(tf.nest.pack_sequence_as(batch, cut), stop - start, total)


class TestStep:
    """Wraps the `test_step` of a model for `strategy.run`."""

    def __init__(self, model: keras.Model) -> None:
        self._model, self._step = model, model.test_step
        self.kinds: Sequence[Kind] | None = None

    def __call__(self, data: Nest) -> tuple[Nest, tf.Tensor]:
        """Updates the metrics with this replica's rows; returns the logs and the rows."""
        if not isinstance(data, ReplicaRows):  # a data set that the user has distributed
            with replicas_view():
                return self._step(data), count_rows(first_leaf(data))
        before = [(v, tf.identity(v.value)) for v in self._model.metrics_variables]
        with self._as_in_one_process(data):
            logs = self._step(tf.nest.map_structure(_of_any_length, data.batch))
        for variable, value in before:
            if not is_whole(variable):
                variable.assign(tf.where(data.rows == 0, value, variable.value))
        if not is_stock(self._model, "test_step"):
            logs = mean_over_replicas(logs, tf.cast(data.rows / data.total, tf.float64))
        return logs, data.rows

    @contextmanager
    def _as_in_one_process(self, data: ReplicaRows) -> Iterator[None]:
        """Makes the mean of this thread's losses over replicas, by rows, that of the batch."""
        fraction = tf.cast(data.rows / data.total, tf.float32)
        divisor = tf.where(data.rows == 0, 1.0, fraction)

        def token_factor(tokens: tf.Tensor, _: str) -> tf.Tensor:
            tokens = tf.where(data.rows == 0, 0.0, tf.cast(tokens, tf.float32))
            context = tf.distribute.get_replica_context()
            total = context.all_reduce(tf.distribute.ReduceOp.SUM, tokens)
            return tf.math.divide_no_nan(tokens, total) / divisor

        kinds = iter(self.kinds or ())

        def scalar(value: tf.Tensor, weight: tf.Tensor | None) -> tuple[tf.Tensor, Nest]:
            kind = next(kinds, Kind.MEAN)
            if kind in (Kind.SUM, Kind.SUM_AND_REGULARISERS):
                constant = regularisation(self._model) if kind == Kind.SUM_AND_REGULARISERS else 0.0
                constant = tf.cast(constant, value.dtype)
                value = (value - constant) / tf.cast(divisor, value.dtype) + constant
            return value, fraction if weight is None else weight

        with (
            fresh_traces(),
            replicas_view(),
            added_vectors_scaled(1.0 / divisor, data.batch),
            intercepted_scalars(scalar),
            token_means_scaled(token_factor),
            whole_batches((fraction, lambda tensors, run: run(tensors))),
        ):
            yield


def _predict_rows(predict_step: Callable[[Nest], Nest], data: Nest) -> Nest:
    """Returns the predictions of a replica's rows."""
    if not isinstance(data, ReplicaRows):
        return predict_step(data)
    kept = tf.cast(data.rows > 0, tf.int64)
    return keras.tree.map_structure(
        lambda leaf: slice_rows(leaf, 0, kept * count_rows(leaf)) if has_rows(leaf) else leaf,
        predict_step(data.batch),
    )


def has_mean_loss(model: keras.Model) -> bool:
    """Returns whether a model's test step and losses are Keras's own, and means over samples."""
    return is_stock(model, "test_step", "compute_loss") and all(
        loss is None
        or isinstance(loss, str)
        or (is_of_keras(loss) and getattr(loss, "reduction", "mean") not in ("sum", None))
        for loss in keras.tree.flatten(model.loss)
    )


def regularisation(model: keras.Model) -> tf.Tensor:
    """Returns what the regularisers of a model's weights add to its loss."""
    return tf.add_n([tf.zeros(()), *model._get_regularization_losses()])


def _iterate_over_rows(
    check_all_call: Method, original: Method, self: Epochs, *args: Nest, **options: Nest
) -> None:
    """Replaces the constructor of Keras's iterator over epochs."""
    strategy = options.get("distribute_strategy")
    distributed = isinstance(options.get("x"), tf.distribute.DistributedDataset)
    training = "class_weight" in options  # only `fit` passes it
    if training or distributed or not _has_replicas(strategy):
        original(self, *args, **options)
        return
    del options["distribute_strategy"]
    EpochIterator.__init__(self, **options)
    self._distribute_strategy = strategy
    with current_activity().during(Activity.MEETING):
        check_all_call(self.num_batches or 0)
    self._distributed_dataset = Rows(self.data_adapter.get_tf_dataset(), strategy)


@contextmanager
def _then_checked(check_samples: Method, original: Method, epochs: Epochs) -> Iterator[None]:
    """Replaces `catch_stop_iteration`, the context in which Keras iterates over an epoch."""
    with original(epochs):
        yield
    if isinstance(epochs._distributed_dataset, Rows):
        check_samples(epochs._distributed_dataset.samples)


def _if_several(
    replacement: Method, original: Method, model: Trainer, *args: object, **options: object
) -> Any:
    """Calls the replacement of a method where batches are split among replicas."""
    if _has_replicas(model.distribute_strategy):
        return replacement(original, model, *args, **options)
    return original(model, *args, **options)


def _make_test_function(
    kinds: Method, original: Method, model: Trainer, force: bool = False
) -> None:
    if is_patched(model.test_function) and not force:
        return
    take_whole_batches(model)
    step = TestStep(model)
    with replaced(model, "test_step", step):
        original(model, force=True)
    function = model.test_function

    def test_function(iterator: Iterator[Nest]) -> Nest:
        data = next(iterator)
        if step.kinds is None and isinstance(data, ReplicaRows):
            step.kinds = kinds(model, local(model.distribute_strategy, data.batch))
        logs, rows = function(chain([data], iterator))
        set_last_rows(model, rows)
        return logs

    model.test_function = patched(test_function)


def _make_predict_function(original: Method, model: Trainer, force: bool = False) -> None:
    if is_patched(model.predict_function) and not force:
        return
    functions = []
    for _ in range(2):  # for rows, and for `predict_on_batch`: they differ in their traces
        original(model, force=True)
        functions.append(model.predict_function)
    function, function_of_batch = functions

    def predict_function(data: Nest) -> Nest:
        if _is_local.value:
            with replaced(keras_trainer, "reduce_per_replica", _local_part):
                return function_of_batch(data)
        # Keras looks the step up when it traces, not when it makes the function.
        with replaced(model, "predict_step", partial(_predict_rows, model.predict_step)):
            return function(data)

    model.predict_function = patched(predict_function)


def _predict_locally(original: Method, model: Trainer, x: Nest) -> Nest:
    """Replaces `predict_on_batch`, whose rows every worker passes, and gets, for itself."""
    with _is_local(True):
        return original(model, x)


def _local_part(values: Nest, strategy: tf.distribute.Strategy, reduction: str) -> Nest:
    """Returns what the first replica of this process has computed."""
    return local(strategy, values)


def _agree_on_logs(global_logs: Method, original: Method, model: Trainer, logs: Logs) -> Nest:
    """Replaces `_get_metrics_result_or_logs`, which returns the logs of an epoch."""
    with current_activity().during(Activity.MEETING):  # results of metrics are global
        result = original(model, logs)
    return global_logs(model, logs) if result is logs else result


def _has_replicas(strategy: tf.distribute.Strategy | None) -> bool:
    """Returns whether batches are split among several replicas that `LoadBalancer` supports."""
    return isinstance(strategy, STRATEGIES) and strategy.num_replicas_in_sync > 1


def has_rows(leaf: object) -> bool:
    """Returns whether a leaf of a batch is a tensor with an axis of samples."""
    return isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) and leaf.shape.rank != 0


def _of_any_length(leaf: object) -> object:
    """Returns a tensor of unknown length, as those of data sets are: Keras weights others more."""
    if tf.executing_eagerly() or not (isinstance(leaf, tf.Tensor) and leaf.shape.rank):
        return leaf
    return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])
