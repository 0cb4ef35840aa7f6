"""Metrics of all workers: scalars on their way to `Mean`, and the batches of those by hand.

Keras sums the states of the workers' metrics. That of a metric that a user has written need not be
a sum over samples, so each worker updates it with the rows of all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.trainers.compile_utils import CompileMetrics

from lbbsp_tf.compat.fitting import is_of_keras
from lbbsp_tf.compat.replicas import mean_over_replicas
from lbbsp_tf.compat.values import Method, Nest, PerThread, is_patched, patched

LARGEST_BYTES = 1 << 16
"""Of a sample, which each worker sends to all others for a metric written by hand."""

logger = logging.getLogger("lbbsp.tf")


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

    As a single process would compute them, if the handler of `intercepted_scalars` knows how.
    """

    def of_all(value: object) -> object:
        if not (tf.is_tensor(value) and value.shape.rank == 0 and value.dtype.is_floating):
            return value
        found, weight = intercepted_scalars.value(value, None)
        return found if weight is None else tf.cast(mean_over_replicas(found, weight), value.dtype)

    return lambda batch: keras.tree.map_structure(of_all, train_step(batch))


def take_whole_batches(model: keras.Model) -> None:
    """Prepares the metrics of a model that are written by hand for `whole_batches`."""
    for metric in model.metrics:
        for each in metric.metrics if isinstance(metric, CompileMetrics) else [metric]:
            if not (is_of_keras(each) or is_patched(each.update_state)):
                object.__setattr__(each, "update_state", patched(_updating(each)))
                _count_once(each, True)


def is_whole(variable: keras.Variable) -> bool:
    """Returns whether a variable of a metric is that of all workers on each of them."""
    return variable.value.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA


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
        given, handler = (args, options), None
        share, run = whole_batches.value or (None, None)
        with whole_batches(None):  # metrics inside of it get the same
            if run is not None:
                once = all(map(_is_small, keras.tree.flatten(given)))
                _count_once(metric, once)
                if once:
                    given = keras.tree.map_structure(partial(_of_all, share, run), given)
                else:
                    _warn_of(metric.name)
                    handler = lambda value, own: (value, share if own is None else own)  # noqa: E731
            with intercepted_scalars(handler):
                update(*given[0], **given[1])

    return update_state


def _is_small(leaf: object) -> bool:
    """Returns whether a leaf is no tensor, or one of which all workers can get all rows."""
    if not isinstance(leaf, tf.Tensor) or leaf.dtype in (tf.string, tf.bool):
        return not tf.is_tensor(leaf)
    row = leaf.shape[1:]
    return row.is_fully_defined() and row.num_elements() * leaf.dtype.size <= LARGEST_BYTES


def _of_all(share: tf.Tensor, run: Method, leaf: object) -> object:
    """Returns the rows of all replicas, or the mean of a scalar over them."""
    if not tf.is_tensor(leaf) or leaf.shape.rank == 0:
        return mean_over_replicas(leaf, tf.cast(share, tf.float64))
    context = tf.distribute.get_replica_context()
    rows = leaf[: tf.where(share > 0, tf.shape(leaf)[0], 0)]  # else those of another replica
    (found,) = run([rows], lambda parts: [context.all_gather(parts[0], 0)])
    mask = get_keras_mask(leaf)
    if mask is not None:
        set_keras_mask(found, tf.cast(_of_all(share, run, tf.cast(mask, tf.int32)), tf.bool))
    return found


def _warn_of(name: str) -> None:
    if tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) == 0:
        logger.warning(
            "the metric %r gets more than %d KiB of a sample, so that each worker updates it with "
            "its own rows: what is shown is computed from the sum of its variables over workers "
            "(of a function, the mean), and right only if they are sums over samples",
            name,
            LARGEST_BYTES >> 10,
        )
