"""The network that the cluster benchmarks train: few weights, much work a sample."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

SIDE, SAMPLES = 40, 384


def data() -> tuple[np.ndarray, np.ndarray]:
    """Seeded noise images, shape ``(SAMPLES, SIDE, SIDE, 1)``, and labels."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(SAMPLES, SIDE, SIDE, 1)).astype("f4"), rng.integers(0, 10, SAMPLES)


def convolutional(strategy: tf.distribute.Strategy, channels: int) -> keras.Model:
    """A compiled network whose cost a sample grows with the square of `channels`."""
    layers = keras.layers
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                layers.Input((SIDE, SIDE, 1)),
                layers.Conv2D(channels, 3, activation="relu"),
                layers.Conv2D(channels, 3, activation="relu"),
                layers.Conv2D(channels, 3, activation="relu"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss)
    return model
