"""Weights of losses, or parts of them, that are no means over samples but can be weighted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as loss_module

from lbbsp_tf.compat.values import Method, Nest, PerThread
from lbbsp_tf.rows import Batch, count_rows

Factor: TypeAlias = "Callable[[tf.Tensor, str], tf.Tensor]"


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


def added_vectors_scaled(factor: tf.Tensor, batch: Batch) -> AbstractContextManager[None]:
    """Multiplies by a factor what `add_loss` was given as a vector with a loss of each sample.

    Keras sums such a vector, and adds the sum to a loss that is a mean over samples. The length of
    such a vector is the number of samples of `batch`.
    """
    rows = int(count_rows(batch)) if tf.executing_eagerly() else None  # unknown in a graph
    return _vectors((factor, rows))
