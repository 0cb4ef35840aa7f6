"""Keras's random state in replicas.

Keras keeps its global state by thread, and strategies run the step of a replica in a thread of its
own: there `keras.random` would create the variable of the state again in each trace, which
TensorFlow rejects. The states of all replicas are equal, so that all of them would draw the same
noise for their samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import SeedGenerator, global_seed_generator

from lbbsp_tf.compat.values import Method, PerThread

_GLOBAL_SEED_GENERATOR = "global_seed_generator"  # a constant in Keras 3.14, not in 3.12
_STRIDE = 1_000_003  # between the seeds of replicas


def _by_rank(rank: int, draw: Method, generator: SeedGenerator, ordered: bool = True) -> tf.Tensor:
    seed = draw(generator, ordered)
    return seed + tf.constant([rank * _STRIDE, 0], seed.dtype)  # the first replica's is as alone


noise_of_replica = PerThread((SeedGenerator, "next", _by_rank))
"""Context in which a replica, by its rank, draws noise of its own from the shared states."""


def has_global_seed() -> bool:
    """Returns whether Keras's global random state exists in this thread."""
    return global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR) is not None


def forget_global_seed() -> None:
    """Makes Keras create its global random state again when it next needs it."""
    global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, None)


def shared_global_seed(strategy: tf.distribute.Strategy) -> Callable[[], None]:
    """Returns a function that makes this thread's global random state that of a replica's."""
    # Keras draws the seed from Python's generator, which must give the user's next models the
    # numbers that it would give them without us.
    state = random.getstate()
    with strategy.scope():
        generator = global_seed_generator()
    random.setstate(state)
    return lambda: global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)
