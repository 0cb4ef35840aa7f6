"""Patches under which a train step can be probed: with its gradients comparable between batches.

Noise is then the same for every sample of a batch of any size, except that orders by it are mixed,
batch normalisation treats samples separately, and gradients can be taken in another way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from types import ModuleType

import keras
import numpy as np
import tensorflow as tf
from keras.src.utils import traceback_utils
from tensorflow.python.framework import tensor_util
from tensorflow.python.ops import (
    custom_gradient,
    gen_logging_ops,
    gen_random_ops,
    gen_stateful_random_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
)

from lbbsp_tf.compat.tracing import current_graph
from lbbsp_tf.compat.values import Method, Nest, PerThread, Place, replaced, wrapped

_STATELESS = (
    "stateless_random_normal_v2",
    "stateless_random_uniform_v2",
    "stateless_random_uniform_int_v2",
    "stateless_truncated_normal_v2",
)
_STATEFUL: dict[str, Method] = {
    "random_standard_normal": tf.random.stateless_normal,
    "random_uniform": tf.random.stateless_uniform,
    "truncated_normal": tf.random.stateless_truncated_normal,
}

# What stands in for distributions with parameters, which may differ by sample: functions of these
# and of numbers in [0, 1), `uniform(shape)`, which are the same for all samples.


def _binomial(
    uniform: Method, shape: Nest, seed: Nest, counts: Nest, probs: Nest, dtype: tf.DType
) -> tf.Tensor:
    mean = tf.cast(counts, tf.float64) * tf.cast(probs, tf.float64)
    return tf.cast(tf.floor(mean + uniform(shape)), dtype)


def _poisson(uniform: Method, shape: Nest, rate: Nest, dtype: tf.DType, **_: Nest) -> tf.Tensor:
    shape = tf.concat([shape, tf.shape(rate)], 0)
    return _binomial(uniform, shape, None, 1, rate, dtype)


def _gamma(uniform: Method, shape: Nest, alpha: tf.Tensor, **_: Nest) -> tf.Tensor:
    return alpha * tf.cast(0.5 + uniform(shape), alpha.dtype)


def _integers(uniform: Method, shape: Nest, low: Nest, high: Nest, **_: Nest) -> tf.Tensor:
    low, high = tf.convert_to_tensor(low), tf.convert_to_tensor(high)
    width = tf.cast(high, tf.float64) - tf.cast(low, tf.float64)
    return low + tf.cast(tf.floor(width * uniform(shape)), low.dtype)


def _category(
    uniform: Method, logits: tf.Tensor, count: Nest, *_: Nest, output_dtype: tf.DType, **__: Nest
) -> tf.Tensor:
    rows, kinds = tf.unstack(tf.shape(logits))
    bounds = (tf.cast(bound, output_dtype) for bound in (0, kinds))
    return _integers(uniform, tf.stack([rows, count]), *bounds)


def _truncated_normal(uniform: Method, shape: Nest, *parameters: Nest, **_: Nest) -> tf.Tensor:
    mean, deviation, low, high = parameters[-4:]
    noise = tf.cast(uniform(shape) - 0.5, mean.dtype)
    return tf.clip_by_value(mean + deviation * noise, low, high)


_WITH_PARAMETERS: dict[tuple[ModuleType, str], Method] = {
    (gen_random_ops, "random_uniform_int"): _integers,
    (gen_random_ops, "random_gamma"): (
        lambda uniform, shape, alpha, **_: _gamma(
            uniform, tf.concat([shape, tf.shape(alpha)], 0), alpha
        )
    ),
    (gen_random_ops, "random_poisson_v2"): _poisson,
    (gen_random_ops, "multinomial"): _category,
    (gen_random_ops, "parameterized_truncated_normal"): _truncated_normal,
    (gen_stateful_random_ops, "stateful_random_binomial"): (
        lambda uniform, state, algorithm, shape, counts, probs, dtype, **_: _binomial(
            uniform, shape, None, counts, probs, dtype
        )
    ),
    (gen_stateless_random_ops, "stateless_random_binomial"): _binomial,
    (gen_stateless_random_ops, "stateless_random_poisson"): (
        lambda uniform, shape, seed, lam, dtype: _binomial(uniform, shape, seed, 1, lam, dtype)
    ),
    (gen_stateless_random_ops, "stateless_multinomial"): _category,
    (gen_stateless_random_ops, "stateless_parameterized_truncated_normal"): _truncated_normal,
    (gen_stateless_random_ops_v2, "stateless_random_gamma_v3"): _gamma,
}

_creates_variable = PerThread()


@contextmanager
def same_noise(variants: Callable[[tf.Tensor], tf.Tensor] | None = None) -> Iterator[None]:
    """Makes random values vary along the last axis only; an order by them mixes the samples.

    Initial values of variables that the function creates stay as they are. Of a number of rows that
    depends on the batch, `variants` returns which noise each gets, in [0, NOISES).
    """
    along_last_axis = partial(_along_last_axis, variants=variants)

    def stateless(original: Method) -> Method:
        return lambda shape, *args, **kwargs: along_last_axis(
            lambda last: original(last, *args, **kwargs), shape
        )

    def stateful(_: object, sample: Method, seed: int) -> Method:
        # A stateful operation would continue its sequence in the next run.
        return lambda shape, dtype, *_, **__: along_last_axis(
            lambda last: sample(last, seed=(seed, 0), dtype=dtype), shape
        )

    changed: list[Place] = [(gen_stateless_random_ops_v2, name, stateless) for name in _STATELESS]
    for seed, (name, sample) in enumerate(_STATEFUL.items()):
        changed.append((gen_random_ops, name, partial(stateful, sample=sample, seed=seed)))
    changed.append((gen_random_ops, "random_shuffle", lambda _: _mixed))
    draws = itertools.count()

    def uniform(shape: Nest) -> tf.Tensor:
        seed = next(draws), 1
        sample = partial(tf.random.stateless_uniform, seed=seed, dtype=tf.float64)
        return along_last_axis(sample, shape)

    for (module, name), stand_in in _WITH_PARAMETERS.items():
        change = partial(stand_in, uniform)
        changed.append((module, name, lambda _, change=change: change))
    places = [(module, name, partial(_only_for_noise, change)) for module, name, change in changed]
    with wrapped(*places), tf.variable_creator_scope(_with_marked_initial_value):
        yield


@contextmanager
def without_outputs() -> Iterator[None]:
    """Leaves out what a function prints by TensorFlow, asserts, and its summaries."""
    nothing = lambda _: lambda *_, **__: tf.no_op()  # noqa: E731
    places = [(gen_logging_ops, name, nothing) for name in ("print_v2", "_assert")]
    with tf.summary.record_if(False), wrapped(*places):
        yield


def _only_for_noise(change: Callable[[Method], Method], original: Method) -> Method:
    """Changes a random operation, but not where the initial value of a variable is computed.

    With equal rows, the kernel of a layer that is built in the train step would learn less.
    """
    noise = change(original)

    def sample(*args: Nest, **kwargs: Nest) -> tf.Tensor:
        initial = tf.executing_eagerly() or _creates_variable.value  # eagerly: in tf.init_scope
        return (original if initial else noise)(*args, **kwargs)

    return sample


def _with_marked_initial_value(
    create: Method, initial_value: Nest = None, **options: Nest
) -> tf.Variable:
    """Creates a variable whose initial value is computed without changes of noise."""

    def marked() -> Nest:
        with _creates_variable(True):
            return initial_value()

    return create(initial_value=marked if callable(initial_value) else initial_value, **options)


def batch_norm_in_inference() -> AbstractContextManager[None]:
    """Makes BatchNormalization use its moving statistics, so that it treats samples separately."""
    layer = keras.layers.BatchNormalization
    call = layer.call

    @wraps(call)
    def without_training(
        self: keras.layers.Layer, inputs: tf.Tensor, training: bool | None = None, mask: Nest = None
    ) -> tf.Tensor:
        return call(self, inputs, training=False, mask=mask)

    return replaced(layer, "call", without_training)


def whole_tracebacks() -> AbstractContextManager[None]:
    """Keeps frames of Keras in tracebacks, whose locals are its layers."""
    return replaced(traceback_utils, "is_traceback_filtering_enabled", lambda: False)


def _to_handler(
    value: Nest, gradient: Method, tape: Nest, target: Nest, sources: Nest, *args: Nest, **kw: Nest
) -> Nest:
    handler, graph = value

    def total() -> Nest:
        weights = args[0] if args else kw.get("output_gradients")
        if weights is not None or current_graph() is not graph:
            return float("nan")
        flat = [tf.cast(tensor, tf.float64) for tensor in keras.tree.flatten(target)]
        return sum(map(tf.reduce_sum, flat))

    flat = keras.tree.flatten(sources)
    of_variables = all(isinstance(s, keras.Variable | tf.Variable) for s in flat)
    return handler(total, of_variables, partial(gradient, tape, target, sources, *args, **kw))


_tapes = PerThread((tf.GradientTape, "gradient", _to_handler))


def intercepted_gradients(handler: Method) -> AbstractContextManager[None]:
    """Passes each `GradientTape.gradient` in this thread to ``handler(total, of_variables, take)``.

    ``total()`` is that of the target's elements, or NaN if it is in an inner graph or has weights;
    `of_variables` is whether all sources are variables; ``take()`` returns the gradient.
    """
    return _tapes((handler, current_graph()))


def own_gradients_scaled(scale: Callable[[], tf.Tensor]) -> AbstractContextManager[None]:
    """Multiplies gradients where they enter functions that have their own, and divides the results.

    That changes nothing if such a function, made by `tf.custom_gradient`, is linear in them.
    """

    def wrap(original: Method) -> Method:
        def decorate(function: Method, args: Nest, kwargs: Nest) -> Nest:
            factor = scale()

            @wraps(function)
            def call(*args: Nest, **kwargs: Nest) -> tuple[Nest, Method]:
                result, gradient = function(*args, **kwargs)

                def scaled(*upstream: tf.Tensor, **variables: Nest) -> Nest:
                    return _times(gradient(*_times(upstream, factor), **variables), 1 / factor)

                return result, scaled

            return original(call, args, kwargs)

        return decorate

    return wrapped((custom_gradient, "_graph_mode_decorator", wrap))


def _times(gradients: Nest, factor: tf.Tensor) -> Nest:
    return tf.nest.map_structure(
        lambda g: None if g is None else tf.math.scalar_mul(tf.cast(factor, g.dtype), g), gradients
    )


NOISES = 7


def _along_last_axis(
    sample: Callable[[Sequence[int]], tf.Tensor],
    shape: tf.Tensor,
    variants: Callable[[tf.Tensor], tf.Tensor] | None,
) -> tf.Tensor:
    shape = tf.convert_to_tensor(shape, tf.int32)
    if not shape.shape.is_fully_defined():
        return sample(shape)
    rank = shape.shape[0]
    last = [1] * (rank - 1) + [shape[-1]] if rank > 1 else [1] * rank
    if variants and rank and tensor_util.constant_value_as_shape(shape)[0] is None:
        # Along one axis: `sample` may itself be one of these replacements.
        noises = tf.reshape(sample(tf.stack([1, NOISES * last[-1]])), [NOISES, *last[1:]])
        noise = tf.broadcast_to(tf.gather(noises, variants(shape[0])), shape)
    else:
        noise = tf.broadcast_to(sample(tf.stack(last) if last else shape), shape)
    # One number for each sample, by which samples may be sorted: equal ones would keep the order.
    if rank and noise.shape[1:].num_elements() == 1 and noise.dtype in (tf.float32, tf.float64):
        tilt = 32 * np.finfo(noise.dtype.as_numpy_dtype).eps * _tilt(shape[0])
        noise += tf.reshape(tf.cast(tilt, noise.dtype), shape)
    return noise


def _mixed(value: tf.Tensor, *_: Nest, **__: Nest) -> tf.Tensor:
    return tf.gather(value, tf.argsort(_tilt(tf.shape(value)[0])))


def _tilt(rows: tf.Tensor) -> tf.Tensor:
    """Returns distinct numbers that neither rise nor fall."""
    return tf.cos(2.4 * tf.cast(tf.range(rows), tf.float64) + 0.5)
