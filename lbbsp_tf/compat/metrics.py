"""Losses and metrics: weights of what is no mean over samples, and values that workers reduce."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import TypeAlias

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as loss_module
from keras.src.trainers.compile_utils import CompileMetrics

from lbbsp_tf.compat.fitting import is_of_keras
from lbbsp_tf.compat.replicas import mean_over_replicas
from lbbsp_tf.compat.values import Method, Nest, PerThread, is_patched, patched
from lbbsp_tf.rows import count_rows, first_leaf

logger = logging.getLogger("lbbsp.tf")

Factor: TypeAlias = "Callable[[tf.Tensor, str], tf.Tensor]"

LARGEST_BYTES = 1 << 16
"""Of a sample, which each worker sends to all others for a metric written by hand."""


def _scaled_mask(
    factor: Factor, apply_mask: Method, sample_weight: Nest, mask: Nest, dtype: str, reduction: str
) -> tf.Tensor | None:
    weight = apply_mask(sample_weight, mask, dtype, reduction)
    if mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return weight
    tokens = tf.reduce_sum(tf.cast(mask, tf.float64))
    return weight * tf.cast(factor(tokens, "a mask reaches the loss"), weight.dtype)


def _scaled_by_weights(
    factor: Factor,
    reduce: Method,
    values: Nest,
    sample_weight: Nest = None,
    reduction: str = "mean",
) -> tf.Tensor:
    loss = reduce(values, sample_weight, reduction)
    if reduction != "mean_with_sample_weight" or sample_weight is None:
        return loss
    tokens = tf.reduce_sum(tf.cast(sample_weight, tf.float64))
    scale = factor(tokens, "the loss is divided by the sum of the sample weights")
    return loss * tf.cast(scale, loss.dtype)


token_means_scaled = PerThread(
    (loss_module, "apply_mask", _scaled_mask), (loss_module, "reduce_values", _scaled_by_weights)
)
"""Context in which each loss that is divided by a number of tokens is multiplied by a factor.

This is a function of the divisor of this worker's loss (its valid tokens under a mask, or the sum
of its sample weights), and of words that say so.
"""


def _scaled_vector(
    factor_and_rows: Nest, aggregate: Method, model: keras.Model, loss: tf.Tensor
) -> tf.Tensor:
    factor, rows = factor_and_rows
    # What belongs to samples has their number as its length.
    if loss.shape.rank != 0 and (not loss.shape or loss.shape[0] == rows):
        loss = loss * tf.cast(factor, loss.dtype)
    return aggregate(model, loss)


_vectors = PerThread(
    (keras_trainer.TensorFlowTrainer, "_aggregate_additional_loss", _scaled_vector)
)


def added_vectors_scaled(factor: tf.Tensor, batch: Nest) -> AbstractContextManager[None]:
    """Multiplies by a factor what `add_loss` was given as a vector with a loss of each sample.

    Keras sums such a vector, and adds the sum to a loss that is a mean over samples. The length of
    such a vector is the number of samples of `batch`.
    """
    rows = int(count_rows(first_leaf(batch))) if tf.executing_eagerly() else None  # unknown else
    return _vectors((factor, rows))


def _with_scalar_replaced(
    handler: Method, update: Method, metric: keras.Metric, values: Nest, sample_weight: Nest = None
) -> None:
    if not isinstance(values, tf.RaggedTensor) and len(keras.ops.shape(values)) == 0:
        values, sample_weight = handler(values, sample_weight)
    update(metric, values, sample_weight)


intercepted_scalars = PerThread((keras.metrics.Mean, "update_state", _with_scalar_replaced))
"""Context with a handler that replaces each scalar of `Mean.update_state`, and its weight."""

whole_batches = PerThread()
"""Context in which metrics written by hand are updated with the rows of all replicas.

It is given a replica's share of the rows, and a function that runs a collective of tensors.
"""


def with_results_of_all(train_step: Callable[[Nest], Nest]) -> Callable[[Nest], Nest]:
    """Wraps a step of a replica, so that fractional scalars in its results are those of all.

    As a single process would compute them, if a handler of `intercepted_scalars` knows how.
    """

    def of_all(value: Nest) -> Nest:
        handler = intercepted_scalars.value
        is_scalar = tf.is_tensor(value) and value.shape.rank == 0 and value.dtype.is_floating
        if handler is None or not is_scalar:
            return value
        scalar, share = handler(value, None)
        return scalar if share is None else tf.cast(mean_over_replicas(scalar, share), value.dtype)

    return lambda batch: keras.tree.map_structure(of_all, train_step(batch))


def take_whole_batches(model: keras.Model) -> None:
    """Prepares the metrics of a model that are written by hand for `whole_batches`."""
    for metric in model.metrics:
        for part in metric.metrics if isinstance(metric, CompileMetrics) else [metric]:
            if not (is_of_keras(part) or is_patched(part.update_state)):
                object.__setattr__(part, "update_state", patched(_updating(part)))
                _count_once(part, True)


def is_whole(variable: keras.Variable) -> bool:
    """Returns whether a variable of a metric is that of all workers on each of them."""
    return bool(variable.value.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA)


def _count_once(metric: keras.Metric, once: bool) -> None:
    kinds = tf.VariableAggregation
    for variable in metric.variables:
        if hasattr(variable.value, "_aggregation"):
            variable.value._aggregation = kinds.ONLY_FIRST_REPLICA if once else kinds.SUM


def _updating(metric: keras.Metric) -> Method:
    """Wraps `update_state` of a metric written by hand."""
    update = metric.update_state

    @wraps(update)
    def update_state(*args: object, **options: object) -> None:
        arguments, handler = (args, options), None
        share, run = whole_batches.value or (None, None)
        with whole_batches(None):  # metrics inside of it get the same
            if run is not None:
                once = all(map(_is_small, keras.tree.flatten(arguments)))
                _count_once(metric, once)
                if once:
                    arguments = keras.tree.map_structure(partial(_of_all, share, run), arguments)
                else:
                    _warn_of(metric.name)
                    handler = lambda value, w: (value, share if w is None else w)  # noqa: E731
            with intercepted_scalars(handler):
                update(*arguments[0], **arguments[1])

    return update_state


def _is_small(leaf: object) -> bool:
    """Returns whether a leaf is no tensor, or one of which all workers can get all rows."""
    if not isinstance(leaf, tf.Tensor) or leaf.dtype in (tf.string, tf.bool):
        return not tf.is_tensor(leaf)
    row = leaf.shape[1:]
    return bool(row.is_fully_defined() and row.num_elements() * leaf.dtype.size <= LARGEST_BYTES)


def _of_all(share: tf.Tensor, run: Method, leaf: Nest) -> Nest:
    """Returns the rows of all replicas, or the mean of a scalar over them."""
    if not tf.is_tensor(leaf) or leaf.shape.rank == 0:
        return mean_over_replicas(leaf, tf.cast(share, tf.float64))
    context = tf.distribute.get_replica_context()
    rows = leaf[: tf.where(share > 0, tf.shape(leaf)[0], 0)]  # else those of another replica
    (all_rows,) = run([rows], lambda parts: [context.all_gather(parts[0], 0)])
    mask = get_keras_mask(leaf)
    if mask is not None:
        set_keras_mask(all_rows, tf.cast(_of_all(share, run, tf.cast(mask, tf.int32)), tf.bool))
    return all_rows


def _warn_of(name: str) -> None:
    if tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) == 0:
        logger.warning(
            "the metric %r gets more than %d KiB of a sample, so that each worker updates it with "
            "its own rows: what is shown is computed from the sum of its variables over workers "
            "(of a function, the mean), and right only if they are sums over samples",
            name,
            LARGEST_BYTES >> 10,
        )
