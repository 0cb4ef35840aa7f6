"""Network that the cluster benchmarks train, with few weights and much computation per sample."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

SIDE, SAMPLES = 40, 384


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns seeded noise images, shape ``(SAMPLES, SIDE, SIDE, 1)``, and labels."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(SAMPLES, SIDE, SIDE, 1)).astype("f4"), rng.integers(0, 10, SAMPLES)


def convolutional(strategy: tf.distribute.Strategy, channels: int) -> keras.Model:
    """Returns a compiled network whose cost per sample grows with the square of `channels`."""
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
