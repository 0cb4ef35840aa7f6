"""Keras's global random state in the threads of replicas.

Keras keeps it by thread, and strategies run the step of a replica in a thread of its own: there
`keras.random` would create the variable of its state anew in each trace, which TensorFlow rejects.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator


def shared_global_seed(strategy: tf.distribute.Strategy) -> Callable[[], None]:
    """Returns a function that makes this thread's global random state that of a replica's thread.

    Args:
        strategy: Strategy under which the state is created, unless it exists.
    """
    with strategy.scope():
        generator = global_seed_generator()
    return lambda: global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
