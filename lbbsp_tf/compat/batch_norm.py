"""Patch of the moments of synchronised batch normalisation.

Keras's own moments (``BatchNormalization(synchronized=True)``)

- ignore other workers if the input has a mask;
- use three all-reduces in the forward pass and two in the backward pass, here one and one;
- compute the variance as ``E[x^2] - E[x]^2``, which cancels if the mean is large. Here `x` is
  shifted by the moving mean, which is the same on all workers and soon close to the mean.
"""

from __future__ import annotations

import keras
import tensorflow as tf
from keras.layers import BatchNormalization

from lbbsp_tf.compat.values import Method, Nest, PerThread, patch_broken


def synchronize_moments() -> None:
    """Makes synchronised batch normalisation exact with masks, in one all-reduce per pass."""
    patch_broken(BatchNormalization, "_moments", "synchronized=self.synchronized", _moments)


def _noticed(
    notice: Method,
    call: Method,
    layer: BatchNormalization,
    inputs: tf.Tensor,
    training: bool | None = None,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    if training and layer.trainable and not layer.synchronized:
        notice()
    return call(layer, inputs, training=training, mask=mask)


plain_batch_norm_noticed = PerThread((BatchNormalization, "call", _noticed))
"""Context in which a function is called for each layer that normalises the batch of a replica."""


def _moments(
    original: Method, layer: BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None
) -> Nest:
    """Returns mean and variance by channel of the batches of all replicas together."""
    context = tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None
    if context is None or not layer.synchronized:
        return original(layer, inputs, mask)
    axes = layer._reduction_axes
    channels = [1] * len(inputs.shape)
    channels[layer.axis] = -1
    shift = tf.cast(layer.moving_mean, inputs.dtype)
    shifted = inputs - tf.reshape(shift, channels)
    if mask is None:
        count = tf.cast(tf.reduce_prod(tf.gather(tf.shape(inputs), axes)), inputs.dtype)
    else:
        mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
        shifted = tf.where(mask, shifted, 0)
        count = tf.reduce_sum(tf.cast(mask, inputs.dtype), axes)
    total, squares, count = context.all_reduce(
        tf.distribute.ReduceOp.SUM,
        [tf.reduce_sum(shifted, axes), tf.reduce_sum(tf.square(shifted), axes), count],
    )
    count = tf.stop_gradient(count)
    if mask is None:
        mean = tf.math.divide_no_nan(total, count)
        # As in `tf.nn.moments`, the derivative of the variance does not depend on the mean.
        fixed = tf.stop_gradient(mean)
        variance = tf.math.divide_no_nan(squares, count) - fixed * (2 * mean - fixed)
        return shift + mean, tf.maximum(variance, 0)
    # As Keras divides by it: a masked mean is scaled down a little.
    divisor = count + keras.config.epsilon()
    mean = (total + count * shift) / divisor
    offset = mean - shift
    variance = (squares - 2 * offset * total + count * tf.square(offset)) / divisor
    return mean, tf.maximum(variance, 0)
