"""Switches by which parts of a train step show that do not take part in it yet: `Switches`."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import op_def_library
from tensorflow.python.ops import cond as cond_module
from tensorflow.python.ops import gen_math_ops
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph, WhileCondFuncGraph
from tensorflow.python.ops.gen_math_ops import select_v2

from lbbsp_tf.compat.values import Method, Nest, replaced, wrapped

GAIN = 1000.0

_KINKED = {
    **dict.fromkeys(("Abs", "Sign"), ("x",)),
    **dict.fromkeys(("Relu", "Relu6", "LeakyRelu", "Elu", "Selu"), ("features",)),
    **dict.fromkeys(("Max", "Min"), ("input",)),
    **dict.fromkeys(("Maximum", "Minimum"), ("x", "y")),
}
"""Operations that are linear on either side of a number, with their arguments."""

_DECIDED_BY = {"SelectV2": "condition", "Cast": "x"}
_COMPARED = "the loss, where a number of the whole batch is compared ({}),"
_COMPARISONS = {"Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"}
_SIZES = {"Shape", "ShapeN", "Size"}


class Switches:
    """Switches of a step while it is traced, numbered in order; the `chosen` one is on.

    A term of the loss may have a small weight, or begin later: with a weight that is zero at first,
    or in the branch of a condition that is not taken yet. Switched on, it shows. A switch
    multiplies the scalar weight of a term by `GAIN`, or replaces it by that if it is 0, or inverts
    a condition. Only what depends on no argument but `chosen`, so on no sample, has one.

    A number of the whole batch, such as a mean loss, may be compared with another one, in a minimum
    or a condition. Both parts of a few samples are on the same side of it, and such a step is
    linear at first. So a switch puts the number on the other side where `is_part` is true.
    """

    def __init__(self, chosen: tf.Tensor, is_part: tf.Tensor) -> None:
        self._chosen, self._is_part = chosen, is_part
        # What each switch changes; replicas are traced in threads of their own.
        self._of_threads: defaultdict[int, list[str]] = defaultdict(list)
        self._is_paused = False

    def paused(self) -> AbstractContextManager[None]:
        """Gives no switches to what is traced inside the context."""
        return replaced(self, "_is_paused", True)

    def all(self) -> Iterable[str]:
        """Returns what each switch changes."""
        return max(self._of_threads.values(), key=len, default=[])

    def installed(self) -> AbstractContextManager[None]:
        """Gives switches to what is traced inside the context."""
        return wrapped(
            (gen_math_ops, "mul", self._weighted),
            (gen_math_ops, "real_div", self._weighted),
            (cond_module, "cond", self._chosen_by),
            (op_def_library, "_apply_op_helper", self._created),
        )

    def _weighted(self, original: Method) -> Method:
        def weighted(x: Nest, y: Nest, name: str | None = None) -> tf.Tensor:
            result = original(x, y, name)
            is_number = result.dtype.is_floating and result.shape.rank in (0, 1)
            if not is_number or not self._is_recorded(result):
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
        return lambda condition, *args, **kw: original(self._inverted(condition), *args, **kw)

    def _created(self, original: Method) -> Method:
        def create(kind: str, name: str | None = None, **inputs: Nest) -> Nest:
            if kind in _KINKED:
                inputs = self._reflected(kind, inputs)
            elif place := _DECIDED_BY.get(kind):
                inputs[place] = self._inverted(inputs[place])
            return original(kind, name, **inputs)

        return create

    def _inverted(self, condition: Nest) -> Nest:
        condition = tf.convert_to_tensor(condition)  # it may be a variable
        is_condition = condition.dtype == tf.bool and tf.is_symbolic_tensor(condition)
        if self._is_paused or not is_condition:
            return condition
        if (kind := _comparison(condition)) and self._is_of_whole_batch(condition):
            return condition ^ (self._next(_COMPARED.format(kind)) & self._is_part)
        reads = (operation.type == "ReadVariableOp" for operation in _origins(condition))
        if condition.shape.rank == 0 and any(reads) and not self._is_of_samples(condition):
            return condition ^ self._next()
        return condition

    def _reflected(self, kind: str, inputs: dict[str, Nest]) -> dict[str, Nest]:
        """Returns inputs of which one may be on the other side of the second one, or of zero."""
        names = _KINKED[kind]
        for name, other in zip(names, reversed(names), strict=True):
            value = inputs[name]
            is_number = self._is_recorded(value) and value.dtype.is_floating
            if is_number and self._is_of_whole_batch(value):
                with self.paused():
                    bound = tf.zeros_like(value) if other == name else inputs[other]
                    moved = value + tf.stop_gradient(2 * (bound - value))
                    is_moved = self._next(_COMPARED.format(kind)) & self._is_part
                    return {**inputs, name: select_v2(is_moved, moved, value)}
        return inputs

    def _is_recorded(self, tensor: Nest) -> bool:
        is_recorded = record.could_possibly_record()  # by a tape: other values, as of metrics, stay
        return not self._is_paused and is_recorded and tf.is_symbolic_tensor(tensor)

    def _is_of_samples(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor depends on an argument; that of an inner graph may be any."""
        arguments = (operation for operation in _origins(tensor) if operation.type == "Placeholder")
        return any(argument is not self._chosen.op for argument in arguments)

    def _is_of_whole_batch(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor depends on samples, but has no axis of them; not if in doubt."""
        graph = tensor.graph
        while graph is not self._chosen.graph:
            if isinstance(graph, WhileBodyFuncGraph | WhileCondFuncGraph):  # perhaps of one sample
                return False
            graph = graph.outer_graph
        if not tensor.shape.is_fully_defined():
            return False
        origins = list(_origins(tensor, beside=_SIZES))
        if any(operation.type == "PlaceholderWithDefault" for operation in origins):
            return False  # the number of a sample, in `tf.vectorized_map`
        return any(map(self._is_batch, origins))

    def _is_batch(self, operation: tf.Operation) -> bool:
        """Returns whether an operation is an argument that has, or chooses, samples."""
        if operation.type != "Placeholder" or operation is self._chosen.op:
            return False
        has_rows = not operation.outputs[0].shape.is_fully_defined()
        return has_rows or operation.graph is self._chosen.graph

    def _next(self, what: str = "a term or branch of the loss") -> tf.Tensor:
        switches = self._of_threads[threading.get_ident()]
        switches.append(what)
        return tf.equal(self._chosen, len(switches) - 1)


def _comparison(condition: tf.Tensor) -> str | None:
    """Returns the type of the comparison that a condition consists of, if it is one."""
    operation = condition.op
    if operation.type in _COMPARISONS:
        return str(operation.type)
    combines = operation.type.startswith("Logical") or operation.type == "Identity"
    return next(filter(None, map(_comparison, operation.inputs)), None) if combines else None


def _origins(tensor: tf.Tensor, beside: Collection[str] = ()) -> Iterator[tf.Operation]:
    """Yields the operations that a tensor depends on, also those outside of an inner graph.

    What only operations of the types `beside` depend on is left out.
    """
    waiting, operations = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        if tf.is_symbolic_tensor(tensor) and tensor.op not in operations:
            operations.add(operation := tensor.op)
            if operation.type in beside:
                continue
            captures = operation.graph.captures if operation.type == "Placeholder" else ()
            outer = [outer for outer, inner in captures if inner.op is operation]
            if not outer:
                yield operation
            waiting += outer or operation.inputs
