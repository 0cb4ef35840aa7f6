"""Patches under which a train step can be probed: with its gradients comparable between batches.

Noise is then the same for every sample of a batch of any size, batch normalisation treats samples
separately, and gradients can be scaled on their way from the tape to the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from types import ModuleType

import keras
import tensorflow as tf
from keras.src.utils import traceback_utils
from tensorflow.python.ops import gen_random_ops, gen_stateless_random_ops_v2

from lbbsp_tf.compat.optimizers import sum_gradients
from lbbsp_tf.compat.values import Nest, PerThread, replaced_attribute

_STATELESS = (
    "stateless_random_normal_v2",
    "stateless_random_uniform_v2",
    "stateless_random_uniform_int_v2",
    "stateless_truncated_normal_v2",
)
_STATEFUL: dict[str, Callable[..., tf.Tensor]] = {
    "random_standard_normal": tf.random.stateless_normal,
    "random_uniform": tf.random.stateless_uniform,
    "truncated_normal": tf.random.stateless_truncated_normal,
}

_creates_variable = PerThread()


@contextmanager
def noise_alike_for_all_samples() -> Iterator[None]:
    """Makes random values vary along the last axis only, and shuffles keep the order.

    Initial values of variables that the function creates stay as they are.
    """

    def stateless(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        return lambda shape, *args, **kwargs: _along_last_axis(
            lambda last: original(last, *args, **kwargs), shape
        )

    def stateful(sample: Callable[..., tf.Tensor], seed: int) -> Callable[..., tf.Tensor]:
        # A stateful operation would continue its sequence in the next run.
        return lambda shape, dtype, *_, **__: _along_last_axis(
            lambda last: sample(last, seed=(seed, 0), dtype=dtype), shape
        )

    with ExitStack() as stack:

        def replace(module: ModuleType, name: str, noise: Callable[..., tf.Tensor]) -> None:
            value = _only_for_noise(noise, getattr(module, name))
            stack.enter_context(replaced_attribute(module, name, value))

        for name in _STATELESS:
            module: ModuleType = gen_stateless_random_ops_v2
            replace(module, name, stateless(getattr(module, name)))
        for seed, (name, sample) in enumerate(_STATEFUL.items()):
            replace(gen_random_ops, name, stateful(sample, seed))
        replace(gen_random_ops, "random_shuffle", lambda value, *_, **__: tf.identity(value))
        stack.enter_context(tf.variable_creator_scope(_with_marked_initial_value))
        yield


def _only_for_noise(
    noise: Callable[..., tf.Tensor], original: Callable[..., tf.Tensor]
) -> Callable[..., tf.Tensor]:
    """Returns `noise`, replaced by `original` where the initial value of a variable is computed.

    With equal rows, the kernel of a layer that is built in the train step would learn less.
    """

    def sample(*args: Nest, **kwargs: Nest) -> tf.Tensor:
        initial = tf.executing_eagerly() or _creates_variable.value  # eagerly: in tf.init_scope
        return (original if initial else noise)(*args, **kwargs)

    return sample


def _with_marked_initial_value(
    create: Callable[..., tf.Variable], initial_value: Nest = None, **options: Nest
) -> tf.Variable:
    """Creates a variable whose initial value is computed without changes of noise."""

    def marked() -> Nest:
        with _creates_variable.set(True):
            return initial_value()

    return create(initial_value=marked if callable(initial_value) else initial_value, **options)


@contextmanager
def batch_norm_in_inference() -> Iterator[None]:
    """Makes BatchNormalization use its moving statistics, so that it treats samples separately."""
    layer = keras.layers.BatchNormalization
    call = layer.call

    @wraps(call)
    def without_training(
        self: keras.layers.Layer, inputs: tf.Tensor, training: bool | None = None, mask: Nest = None
    ) -> tf.Tensor:
        return call(self, inputs, training=False, mask=mask)

    with replaced_attribute(layer, "call", without_training):
        yield


@contextmanager
def scaled_gradients(scale: tf.Tensor | None) -> Iterator[None]:
    """Multiplies gradients with respect to variables by `scale` as they leave a tape, or sums them.

    What a train step does to gradients before it applies them, such as clipping, then shows.
    """
    gradient = tf.GradientTape.gradient

    @wraps(gradient)
    def scaled(self: tf.GradientTape, target: Nest, sources: Nest, *args: Nest, **kw: Nest) -> Nest:
        found = gradient(self, target, sources, *args, **kw)
        flat = keras.tree.flatten(sources)
        if not flat or not all(isinstance(s, keras.Variable | tf.Variable) for s in flat):
            return found
        if scale is None:
            return sum_gradients(found)
        return tf.nest.map_structure(
            lambda g: None if g is None else g * tf.cast(scale, g.dtype), found
        )

    with replaced_attribute(tf.GradientTape, "gradient", scaled):
        yield


def whole_tracebacks() -> AbstractContextManager[None]:
    """Keeps frames of Keras in tracebacks, whose locals are its layers."""
    return replaced_attribute(traceback_utils, "is_traceback_filtering_enabled", lambda: False)


def _along_last_axis(sample: Callable[[Sequence[int]], tf.Tensor], shape: tf.Tensor) -> tf.Tensor:
    shape = tf.convert_to_tensor(shape, tf.int32)
    if not shape.shape.is_fully_defined():
        return sample(shape)
    rank = shape.shape[0]
    last = [1] * (rank - 1) + [shape[-1]] if rank > 1 else [1] * rank
    return tf.broadcast_to(sample(tf.stack(last) if last else shape), shape)
