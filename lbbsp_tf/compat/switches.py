"""Weights and conditions in a train step that can be switched while it is tried.

A term of the loss may have a small weight, or begin later: with a weight that is zero at first, or
in the branch of a condition that is not taken yet. Switched on, it shows.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import cond as cond_module
from tensorflow.python.ops import gen_math_ops
from tensorflow.python.ops.gen_math_ops import select_v2

from lbbsp_tf.compat.values import Method, Nest, wrapped

GAIN = 1000.0


class Switches:
    """Switches of a step while it is traced, numbered in order; the `chosen` one is on.

    It multiplies the scalar weight of a term by `GAIN`, or replaces it by that if it is 0, or
    inverts a condition. Only what depends on no argument but `chosen`, so on no sample, has one.
    """

    def __init__(self, chosen: tf.Tensor) -> None:
        self._chosen = chosen
        self._counts: Counter[int] = Counter()  # replicas are traced in threads of their own
        self.is_paused = False

    def numbers(self) -> range:
        """Returns the numbers of all switches."""
        return range(max(self._counts.values(), default=0))

    def installed(self) -> AbstractContextManager[None]:
        """Gives switches to what is traced inside the context."""
        return wrapped(
            (gen_math_ops, "mul", self._weighted),
            (gen_math_ops, "real_div", self._weighted),
            (gen_math_ops, "select_v2", self._chosen_by),
            (cond_module, "cond", self._chosen_by),
        )

    def _weighted(self, original: Method) -> Method:
        def weighted(x: Nest, y: Nest, name: str | None = None) -> tf.Tensor:
            result = original(x, y, name)
            is_number = result.dtype.is_floating and result.shape.rank in (0, 1)
            if not is_number or not self._is_traced(result):
                return result
            term, weight = result.op.inputs
            gain = GAIN if result.op.type == "Mul" else 1 / GAIN
            if gain == GAIN and self._is_of_samples(weight):
                term, weight = weight, term
            is_weight = weight.shape.rank == 0 and not self._is_of_samples(weight)
            # A vector may have a loss of each sample: only a weight that may be zero matters then.
            is_fixed = result.shape.rank == 1 and tf.get_static_value(weight) is not None
            if not is_weight or is_fixed or not self._is_of_samples(term):
                return result
            louder = gain * (weight + tf.cast(weight == 0, weight.dtype))
            return original(term, select_v2(self._next(), louder, weight))

        return weighted

    def _chosen_by(self, original: Method) -> Method:
        def chosen(condition: Nest, *args: Nest, **kwargs: Nest) -> Nest:
            condition = tf.convert_to_tensor(condition)  # it may be a variable
            if self._is_traced(condition) and condition.shape.rank == 0:
                reads = any(each.type == "ReadVariableOp" for each in _origins(condition))
                if reads and not self._is_of_samples(condition):
                    condition = condition ^ self._next()
            return original(condition, *args, **kwargs)

        return chosen

    def _is_traced(self, tensor: Nest) -> bool:
        is_recorded = record.could_possibly_record()  # by a tape: other values, as of metrics, stay
        return not self.is_paused and is_recorded and tf.is_symbolic_tensor(tensor)

    def _is_of_samples(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor depends on an argument; that of an inner graph may be any."""
        arguments = (each for each in _origins(tensor) if each.type == "Placeholder")
        return any(each is not self._chosen.op for each in arguments)

    def _next(self) -> tf.Tensor:
        thread = threading.get_ident()
        self._counts[thread] += 1
        return tf.equal(self._chosen, self._counts[thread] - 1)


def _origins(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the operations that a tensor depends on, also those outside of an inner graph."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        if tf.is_symbolic_tensor(tensor) and tensor.op not in seen:
            seen.add(operation := tensor.op)
            is_argument = operation.type == "Placeholder"
            captures = operation.graph.captures if is_argument else ()
            outer = [outer for outer, inner in captures if inner.op is operation]
            if not outer:
                yield operation
            waiting += outer or operation.inputs
