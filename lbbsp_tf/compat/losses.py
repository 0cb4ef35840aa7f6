"""Weights of losses, or parts of them, that are no means over samples but can be weighted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as loss_module

from lbbsp_tf.compat.values import replaced_attribute

_WEIGHTED_MEAN = "mean_with_sample_weight"
_MEANS = ("mean", "sum_over_batch_size")


@contextmanager
def token_means_scaled(factor: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Multiplies each loss that is divided by a number of tokens by a factor.

    Args:
        factor: Function of the divisor of this worker's loss: its valid tokens under a mask, or
            the sum of its sample weights.
    """
    apply_mask, reduce_values = loss_module.apply_mask, loss_module.reduce_values

    def masked(
        sample_weight: tf.Tensor | None, mask: tf.Tensor | None, dtype: str, reduction: str
    ) -> tf.Tensor | None:
        weight = apply_mask(sample_weight, mask, dtype, reduction)
        if mask is None or reduction not in _MEANS:
            return weight
        return weight * tf.cast(factor(tf.reduce_sum(tf.cast(mask, tf.float32))), weight.dtype)

    def reduced(
        values: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        reduction: str = "sum_over_batch_size",
    ) -> tf.Tensor:
        loss = reduce_values(values, sample_weight, reduction)
        if reduction != _WEIGHTED_MEAN or sample_weight is None:
            return loss
        return loss * tf.cast(factor(tf.reduce_sum(sample_weight)), loss.dtype)

    with (
        replaced_attribute(loss_module, "apply_mask", masked),
        replaced_attribute(loss_module, "reduce_values", reduced),
    ):
        yield


@contextmanager
def token_means_noticed(found: set[str]) -> Iterator[None]:
    """Adds to `found` why losses are divided by a number of tokens, if there are any."""
    apply_mask, reduce_values = loss_module.apply_mask, loss_module.reduce_values

    def masked(
        sample_weight: tf.Tensor | None, mask: tf.Tensor | None, dtype: str, reduction: str
    ) -> tf.Tensor | None:
        if mask is not None and reduction in _MEANS:
            found.add("a mask reaches the loss")
        return apply_mask(sample_weight, mask, dtype, reduction)

    def reduced(
        values: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        reduction: str = "sum_over_batch_size",
    ) -> tf.Tensor:
        if reduction == _WEIGHTED_MEAN and sample_weight is not None:
            found.add("the loss is divided by the sum of the sample weights")
        return reduce_values(values, sample_weight, reduction)

    with (
        replaced_attribute(loss_module, "apply_mask", masked),
        replaced_attribute(loss_module, "reduce_values", reduced),
    ):
        yield


@contextmanager
def added_vectors_scaled(factor: tf.Tensor) -> Iterator[None]:
    """Multiplies by a factor what `add_loss` was given as a vector with a loss of each sample.

    Keras sums such a vector, and adds the sum to a loss that is a mean over samples.
    """
    aggregate = keras_trainer.TensorFlowTrainer._aggregate_additional_loss

    def scaled(self: keras.Model, loss: tf.Tensor) -> tf.Tensor:
        of_samples = loss.shape.rank != 0 and (not loss.shape or loss.shape[0] is None)
        return aggregate(self, loss * tf.cast(factor, loss.dtype) if of_samples else loss)

    with replaced_attribute(keras_trainer.TensorFlowTrainer, "_aggregate_additional_loss", scaled):
        yield
