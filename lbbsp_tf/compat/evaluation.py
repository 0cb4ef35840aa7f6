"""Patches with which evaluation, validation and prediction take any number of rows.

Keras splits each batch into equal parts, and a worker whose part is empty fails (convolutions,
recurrent layers, CTC) or waits for the others indefinitely. Here every worker iterates over the
same global batches and takes its own rows. A worker without rows computes on one row of the batch,
whose result is discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.epoch_iterator import EpochIterator

from lbbsp_core.runtime.activity import Activity
from lbbsp_tf.compat.losses import added_vectors_scaled, token_means_scaled
from lbbsp_tf.compat.metrics import scalars_weighted
from lbbsp_tf.compat.replicas import STRATEGIES, mean_over_replicas, one_replica_view
from lbbsp_tf.compat.tracing import fresh_traces
from lbbsp_tf.compat.values import Nest, is_patched, patched, replaced
from lbbsp_tf.liveness import current_activity
from lbbsp_tf.rows import count_rows, first_leaf, slice_rows

Logs = Mapping[str, object]

_LAST_ROWS = "_lbbsp_last_rows"
_SPEC_OF_ROWS = "_lbbsp_spec_of_rows"


class ReplicaRows(NamedTuple):
    """One replica's rows of a global batch.

    Args:
        batch: Nest of tensors; one row, to be discarded, if the replica has none.
        rows: Number of rows of the replica; may be 0.
        total: Number of rows of the global batch.
    """

    batch: Nest
    rows: tf.Tensor
    total: tf.Tensor


def patch_evaluation(global_logs: Callable[[keras.Model, Logs], Logs]) -> None:
    """Makes `evaluate`, validation and `predict` equal those of one process.

    Args:
        global_logs: Computes the logs of all workers from those that a custom `train_step` or
            `test_step` has computed on this worker.
    """
    trainer, iterator = keras_trainer.TensorFlowTrainer, keras_trainer.TFEpochIterator
    if is_patched(iterator.__init__):
        return
    iterator.__init__ = patched(_iterate_over_rows(iterator.__init__))
    trainer.make_test_function = patched(_test_on_rows(trainer.make_test_function))
    trainer.make_predict_function = patched(_predict_on_rows(trainer.make_predict_function))
    trainer._get_metrics_result_or_logs = patched(
        _agree_on_logs(trainer._get_metrics_result_or_logs, global_logs)
    )


def last_rows(model: keras.Model) -> int:
    """Returns the number of rows of this worker in the last step of `model`; 1 if unknown."""
    return int(getattr(model, _LAST_ROWS, 1))


def set_last_rows(model: keras.Model, rows: int | tf.Tensor) -> None:
    """Stores the number of rows of this worker in a step of `model`."""
    object.__setattr__(model, _LAST_ROWS, rows)


def spec_of_rows(iterator: object) -> Nest:
    """Returns the structure of the batches of an iterator that yields `ReplicaRows`, or None."""
    return getattr(iterator, _SPEC_OF_ROWS, None)


def split_rows(dataset: tf.data.Dataset, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Splits global batches into the rows of this worker's replicas.

    Args:
        dataset: Global batches, the same on all workers.
        context: Place of this worker.

    Returns:
        One `ReplicaRows` for each replica of this worker and each batch.
    """
    spec, replicas = dataset.element_spec, context.num_replicas_in_sync
    # `predict` orders the rows by place in the worker first, then by worker.
    places = range(context.input_pipeline_id, replicas, context.num_input_pipelines)

    def split(*elements: Nest) -> tf.data.Dataset:
        batch = tf.nest.pack_sequence_as(spec, tf.nest.flatten(elements))
        return tf.data.Dataset.from_tensor_slices(list(places)).map(
            lambda place: rows_of(batch, place, replicas)
        )

    return dataset.flat_map(split).prefetch(tf.data.AUTOTUNE)


def rows_of(batch: Nest, place: tf.Tensor, replicas: int) -> ReplicaRows:
    """Returns the rows of replica `place`, in [0, replicas), of a batch."""
    leaves = tf.nest.flatten(batch)
    total, *others = [count_rows(leaf) for leaf in leaves if _has_rows(leaf)]
    for other in others:
        tf.debugging.assert_equal(other, total, "all arrays of a batch must have the same length")
    place = tf.cast(place, tf.int64)
    start, stop = total * place // replicas, total * (place + 1) // replicas
    length = tf.maximum(stop - start, 1)  # if there are none, a row that will be discarded
    cut = [slice_rows(leaf, start, start + length) if _has_rows(leaf) else leaf for leaf in leaves]
    return ReplicaRows(tf.nest.pack_sequence_as(batch, cut), stop - start, total)


class RowsStep:
    """Wraps `test_step` or `predict_step` for `strategy.run`.

    Args:
        model: Keras model.
        step: Bound method of the model.
    """

    def __init__(self, model: keras.Model, step: Callable[[Nest], Nest]) -> None:
        self._model = model
        self._step = step

    def test(self, data: Nest) -> tuple[Nest, tf.Tensor]:
        """Updates the metrics with this replica's rows; returns the logs and the rows."""
        if not isinstance(data, ReplicaRows):  # a data set that the user has distributed
            with one_replica_view():
                return self._step(data), count_rows(keras.tree.flatten(data)[0])
        before = [(v, tf.identity(v.value)) for v in self._model.metrics_variables]
        with self._as_in_one_process(data):
            logs = self._step(data.batch)
        for variable, value in before:
            variable.assign(tf.where(data.rows == 0, value, variable.value))
        if type(self._model).test_step is not keras.Model.test_step:
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

        with ExitStack() as stack:
            stack.enter_context(fresh_traces())
            stack.enter_context(one_replica_view())
            stack.enter_context(scalars_weighted(fraction))
            stack.enter_context(token_means_scaled(token_factor))
            stack.enter_context(added_vectors_scaled(1.0 / divisor, first_leaf(data.batch)))
            if _sums_over_samples(self._model):
                trackers = (self._model._loss_tracker, *self._model._compile_loss.metrics)
                for tracker in trackers:
                    update = _multiplied(tracker.update_state, 1.0 / divisor)
                    stack.enter_context(replaced(tracker, "update_state", update))
            yield

    def predict(self, data: Nest) -> Nest:
        """Returns the predictions of this replica's rows."""
        if not isinstance(data, ReplicaRows):
            return self._step(data)
        outputs = self._step(data.batch)
        kept = tf.cast(data.rows > 0, tf.int64)
        return keras.tree.map_structure(
            lambda output: (
                slice_rows(output, 0, kept * count_rows(output)) if _has_rows(output) else output
            ),
            outputs,
        )


def _sums_over_samples(model: keras.Model) -> bool:
    """Returns whether all compiled losses of a model are sums over samples, not means."""
    losses = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    return bool(losses) and all(getattr(loss, "reduction", None) == "sum" for loss in losses)


def _multiplied(update: Callable[..., None], factor: tf.Tensor) -> Callable[..., None]:
    """Wraps `update_state` of a mean of losses."""

    @wraps(update)
    def update_state(values: tf.Tensor, sample_weight: object = None) -> None:
        update(values * tf.cast(factor, values.dtype), sample_weight)

    return update_state


def _iterate_over_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of Keras's iterator over epochs."""

    @wraps(original)
    def initialise(
        self: keras_trainer.TFEpochIterator,
        distribute_strategy: tf.distribute.Strategy | None = None,
        *args: object,
        **options: object,
    ) -> None:
        distributed = isinstance(options.get("x"), tf.distribute.DistributedDataset)
        training = "class_weight" in options  # only `fit` passes it
        if training or distributed or not _has_replicas(distribute_strategy):
            original(self, distribute_strategy, *args, **options)
            return
        EpochIterator.__init__(self, *args, **options)
        dataset = self.data_adapter.get_tf_dataset()
        setattr(self, _SPEC_OF_ROWS, dataset.element_spec)
        self._distribute_strategy = distribute_strategy
        self._distributed_dataset = distribute_strategy.distribute_datasets_from_function(
            lambda context: split_rows(dataset, context)
        )

    return initialise


def _test_on_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps `make_test_function`."""

    @wraps(original)
    def make_test_function(self: keras_trainer.TensorFlowTrainer, force: bool = False) -> None:
        if not _has_replicas(self.distribute_strategy):
            original(self, force)
            return
        if _is_current(self.test_function) and not force:
            return
        with replaced(self, "test_step", RowsStep(self, self.test_step).test):
            original(self, force=True)
        function = self.test_function

        def test_function(iterator: object) -> Nest:
            logs, rows = function(iterator)
            set_last_rows(self, rows)
            return logs

        self.test_function = patched(test_function)

    return make_test_function


def _predict_on_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps `make_predict_function`."""

    @wraps(original)
    def make_predict_function(self: keras_trainer.TensorFlowTrainer, force: bool = False) -> None:
        if not _has_replicas(self.distribute_strategy):
            original(self, force)
            return
        if _is_current(self.predict_function) and not force:
            return
        original(self, force=True)
        function = self.predict_function

        def predict_function(data: Nest) -> Nest:
            # Keras looks the step up when it traces, not when it makes the function.
            with replaced(self, "predict_step", RowsStep(self, self.predict_step).predict):
                return function(data)

        self.predict_function = patched(predict_function)

    return make_predict_function


def _agree_on_logs(
    original: Callable[..., Logs], global_logs: Callable[[keras.Model, Logs], Logs]
) -> Callable[..., Logs]:
    """Wraps `_get_metrics_result_or_logs`, which returns the logs of an epoch."""

    @wraps(original)
    def _get_metrics_result_or_logs(self: keras_trainer.TensorFlowTrainer, logs: Logs) -> Logs:
        if not _has_replicas(self.distribute_strategy):
            return original(self, logs)
        with current_activity().during(Activity.MEETING):  # results of metrics are global
            result = original(self, logs)
        if result is not logs:
            return result
        return global_logs(self, logs)

    return _get_metrics_result_or_logs


def _has_replicas(strategy: tf.distribute.Strategy | None) -> bool:
    """Returns whether batches are split among several replicas that `LoadBalancer` supports."""
    return isinstance(strategy, STRATEGIES) and strategy.num_replicas_in_sync > 1


def _is_current(function: Callable[..., Nest] | None) -> bool:
    """Returns whether the model already has our function, not one of before the patch."""
    return function is not None and is_patched(function)


def _has_rows(leaf: object) -> bool:
    return isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) and leaf.shape.rank != 0
