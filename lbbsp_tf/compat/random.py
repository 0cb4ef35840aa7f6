"""Keras's random state in replicas.

Keras keeps its global state by thread, and strategies run the step of a replica in a thread of its
own: there `keras.random` would create the variable of the state again in each trace, which
TensorFlow rejects. The states of all replicas are equal, so that all of them would draw the same
noise for their samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import random as backend
from keras.src.random.seed_generator import SeedGenerator, global_seed_generator
from tensorflow.python.framework.tensor_util import constant_value_as_shape

from lbbsp_tf.compat.values import Method, Nest, PerThread, replaced

_GLOBAL_SEED_GENERATOR = "global_seed_generator"  # a constant in Keras 3.14, not in 3.12
_STRIDE = 1_000_003  # between the seeds of replicas, and of parts
_STRIDE_OF_DRAWS = 7_919  # between those of draws of a part


class Noise:
    """Noise of a replica in a step, or of a part of it that it has claimed.

    Args:
        rank: Number of the replica.
        part: Number that is new for each part of a step, or None for the replica's main part. The
            noise of parts leaves the shared states as they are: workers have different numbers of
            parts.
    """

    def __init__(self, rank: int, part: tf.Tensor | None = None) -> None:
        self._rank, self._part, self._draws = rank, part, 0
        self._has_samples = True

    def draw(self, function: Method, *args: Nest, shape_of: Method, **kw: Nest) -> tf.Tensor:
        """Draws noise, which has no axis of samples if its shape is fixed."""
        fixed = not tf.executing_eagerly() and _is_fixed(shape_of(*args, **kw))
        with replaced(self, "_has_samples", not fixed):
            return function(*args, **kw)

    def seed(self, draw: Method, generator: SeedGenerator, ordered: bool = True) -> tf.Tensor:
        """Returns a seed; the first replica's are those of a single process.

        Those of noise without an axis of samples are the same for all replicas.
        """
        place = self._rank * _STRIDE if self._has_samples else 0
        if self._part is None:
            seed = draw(generator, ordered)
            return seed + tf.constant([place, 0], seed.dtype)
        if not self._has_samples:
            raise NotImplementedError("noise that no sample has would differ between parts")
        state = tf.convert_to_tensor(generator.state.value)
        self._draws += 1
        numbers = tf.stack(
            [place + self._draws * _STRIDE_OF_DRAWS, 1 + tf.cast(self._part, tf.int64)]
        )
        return state + tf.cast(numbers * [1, _STRIDE], state.dtype)


def _is_fixed(shape: Nest) -> bool:
    """Returns whether a graph knows all dimensions of a shape; None stands for an unknown one."""
    if not (isinstance(shape, tf.TensorShape) or tf.is_tensor(shape)):
        if any(dimension is None for dimension in shape):
            return False
        shape = tf.convert_to_tensor(shape, tf.int32)
    if tf.is_tensor(shape):
        shape = constant_value_as_shape(shape)
    return bool(shape.is_fully_defined())


def _shape_of(values: Nest, *_: Nest, **__: Nest) -> Nest:
    return values.shape if hasattr(values, "shape") else tf.convert_to_tensor(values).shape


def _of_mask(inputs: Nest, rate: float, noise_shape: Nest = None, seed: Nest = None) -> Nest:
    if tf.is_tensor(noise_shape):
        return noise_shape
    shape = _shape_of(inputs)
    if noise_shape is None:
        return shape
    return [shape[axis] if size is None else size for axis, size in enumerate(noise_shape)]


def _of_order(x: Nest, axis: int = 0, seed: Nest = None) -> Nest:
    return [_shape_of(x)[axis]]


def _given(shape: Nest, *_: Nest, **__: Nest) -> Nest:
    return shape


SHAPES: dict[str, Method] = {
    "categorical": _shape_of,
    "dropout": _of_mask,
    "shuffle": _of_order,
    **dict.fromkeys(
        ("beta", "binomial", "gamma", "normal", "randint", "truncated_normal", "uniform"), _given
    ),
}
"""Functions of `keras.random` by name, each with that of the shape of its noise."""

noise_of = PerThread(
    (SeedGenerator, "next", Noise.seed),
    *((backend, name, partial(Noise.draw, shape_of=shape_of)) for name, shape_of in SHAPES.items()),
)
"""Context in which a replica draws noise of its own, a `Noise`, from the shared states."""


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
