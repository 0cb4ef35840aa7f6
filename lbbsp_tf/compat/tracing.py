"""Traces of a user's `tf.function` and variables of ours, kept apart from those of others.

TensorFlow traces a `tf.function` inside a train step once, and uses this trace in all graphs. A
trace that was made under a patch would so be used where the patch does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import keras
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from lbbsp_tf.compat.values import Method, Nest, PerThread


def _including(key: object, make: Method, scope_type: object = None) -> object:
    context = make(scope_type)
    return type(context)((context.context, key), context.scope_type)


_traced_for = PerThread((function_context, "make_function_context", _including))


def fresh_traces() -> AbstractContextManager[None]:
    """Makes this thread trace each `tf.function` again, for calls inside the context only."""
    return _traced_for(object())


def current_graph() -> tf.Graph:
    """Returns the graph that is being traced; while executing eagerly, always the same one.

    It differs inside each `tf.function`, `tf.cond` and `tf.while_loop`.
    """
    return tf.compat.v1.get_default_graph()


def plain_variable(value: float, dtype: tf.DType) -> tf.Variable:
    """Creates a variable on the CPU that is not distributed, also inside a strategy's scope."""
    with tf.device("/CPU:0"):
        return ResourceVariable(value, trainable=False, dtype=dtype)


@contextmanager
def attributes_kept(train_step: Callable[[Nest], Nest]) -> Iterator[None]:
    """Restores the attributes of a model and its layers, which may be tensors of another graph.

    Layers keep such tensors for the rest of a train step: losses, or the moments of a distribution.
    """
    model = getattr(train_step, "__self__", None)
    layers = list(model._flatten_layers()) if isinstance(model, keras.Model) else []
    values = [value for layer in layers for value in vars(layer).values()]
    dicts = [*map(vars, layers), *(value for value in values if issubclass(type(value), dict))]
    lists = [value for value in values if issubclass(type(value), list)]
    before = [*map(dict, dicts)], [*map(list, lists)]
    try:
        yield
    finally:
        for dictionary, entries in zip(dicts, before[0], strict=True):
            dict.update(dictionary, entries)  # without Keras's tracking
        for sequence, elements in zip(lists, before[1], strict=True):
            if [*map(id, sequence)] != [*map(id, elements)]:
                list.__setitem__(sequence, slice(None), elements)
