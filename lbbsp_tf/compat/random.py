"""Keras's random state, whose variable a step in a graph cannot create under a strategy."""

from __future__ import annotations

import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator


def create_global_seed(strategy: tf.distribute.Strategy) -> None:
    """Creates the generator that `keras.random` uses without a seed, unless it exists."""
    with strategy.scope():
        global_seed_generator()
