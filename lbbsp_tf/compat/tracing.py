"""Traces of a user's `tf.function` and variables of ours, kept apart from those of others.

TensorFlow traces a `tf.function` inside a train step once, and uses this trace in all graphs. A
trace that was made under a patch would so be used where the patch does not apply.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from lbbsp_tf.compat.values import Method, PerThread


def _including(key: object, make: Method, scope_type: object = None) -> object:
    found = make(scope_type)
    return type(found)((found.context, key), found.scope_type)


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
