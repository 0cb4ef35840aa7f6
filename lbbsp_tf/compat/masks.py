"""Weights of losses that are means over tokens: under a mask, or divided by the sample weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf
from keras.src.losses import loss as loss_module

from lbbsp_tf.compat.values import replaced_attribute

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
        if reduction != "mean_with_sample_weight" or sample_weight is None:
            return loss
        return loss * tf.cast(factor(tf.reduce_sum(sample_weight)), loss.dtype)

    with (
        replaced_attribute(loss_module, "apply_mask", masked),
        replaced_attribute(loss_module, "reduce_values", reduced),
    ):
        yield


@contextmanager
def noticed_masks(found: set[str]) -> Iterator[None]:
    """Adds to `found` the names of reductions under which a mask reaches a loss."""
    apply_mask = loss_module.apply_mask

    def noticing(
        sample_weight: tf.Tensor | None, mask: tf.Tensor | None, dtype: str, reduction: str
    ) -> tf.Tensor | None:
        if mask is not None and reduction in _MEANS:
            found.add(reduction)
        return apply_mask(sample_weight, mask, dtype, reduction)

    with replaced_attribute(loss_module, "apply_mask", noticing):
        yield
