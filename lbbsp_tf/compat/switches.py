"""Switches by which parts of a train step show that do not take part in it yet: `Switches`."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import op_def_library
from tensorflow.python.ops import cond as cond_module
from tensorflow.python.ops import gen_math_ops
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph, WhileCondFuncGraph
from tensorflow.python.ops.gen_math_ops import select_v2

from lbbsp_tf.compat.tracing import current_graph
from lbbsp_tf.compat.values import Method, Nest, replaced, wrapped

GAIN = 1000.0

_KINKED = {
    **dict.fromkeys(("Abs", "Sign", "Sigmoid", "Tanh"), ("x",)),
    **dict.fromkeys(("Relu", "Relu6", "LeakyRelu", "Elu", "Selu"), ("features",)),
    **dict.fromkeys(("Softplus", "Softsign"), ("features",)),
    **dict.fromkeys(("Max", "Min", "ArgMax", "ArgMin", "TopKV2"), ("input",)),
    **dict.fromkeys(("Maximum", "Minimum"), ("x", "y")),
}
"""Operations that are linear, or constant, on either side of a number, with their arguments."""

_DECIDED_BY = {"SelectV2": "condition", "Select": "condition", "Cast": "x"}
_COMPARISONS = {"Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"}
_COMBINED = {"LogicalAnd", "LogicalOr", "LogicalNot", "Identity", "Any", "All"}
_OF_SHAPES = {"Shape", "ShapeN", "Size", "OnesLike", "ZerosLike"}

_TERM = "a term or branch of the loss"
_COMPARED = (
    "the loss, where a number of the whole batch is compared ({}; leave out a bound that is never "
    "reached),"
)
_WITH_ALL_COMPARED = 1_000_000
"""Added to the number of a switch, it turns on all those of comparisons, too."""


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
        self._calls: list[tuple[tf.Graph, list[Nest]]] = []  # of functions: where, and arguments
        self._is_paused = False

    def paused(self) -> AbstractContextManager[None]:
        """Gives no switches to what is traced inside the context."""
        return replaced(self, "_is_paused", True)

    def all(self) -> Iterator[tuple[int, str]]:
        """Yields what to choose in turn, and what that changes."""
        switches = max(self._of_threads.values(), key=len, default=[])
        yield from enumerate(switches)
        if compared := [what for what in switches if what != _TERM]:  # perhaps in such a term
            terms = (number for number, what in enumerate(switches) if what == _TERM)
            yield from ((_WITH_ALL_COMPARED + number, compared[0]) for number in terms)

    def installed(self) -> AbstractContextManager[None]:
        """Gives switches to what is traced inside the context."""
        return wrapped(
            (gen_math_ops, "mul", self._weighted),
            (gen_math_ops, "real_div", self._weighted),
            (cond_module, "cond", self._chosen_by),
            (op_def_library, "_apply_op_helper", self._created),
            (polymorphic_function.Function, "__call__", self._called),
        )

    def _weighted(self, original: Method) -> Method:
        def weighted(x: Nest, y: Nest, name: str | None = None) -> tf.Tensor:
            result = original(x, y, name)
            is_recorded = record.could_possibly_record()  # by a tape: values of metrics stay
            if not (is_recorded and result.dtype.is_floating and self._is_traced(result)):
                return result
            term, weight = result.op.inputs
            gain = GAIN if result.op.type == "Mul" else 1 / GAIN
            if gain == GAIN and self._is_of_samples(weight):
                term, weight = weight, term
            is_weight = weight.shape.rank == 0 and not self._is_of_samples(weight)
            # A vector may have a loss of each sample: only a weight that may be zero matters then.
            # Activations may be rounded or cut where they are large.
            is_fixed = result.shape.rank != 0 and tf.get_static_value(weight) is not None
            if not is_weight or is_fixed or not self._is_of_samples(term):
                return result
            gain = gain if result.shape.rank in (0, 1) else 1.0
            with self.paused():  # else the comparison with zero would have a switch, too
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
            elif kind in ("Case", "StatelessCase"):
                inputs["branch_index"] = self._next_branch(**inputs)
            return original(kind, name, **inputs)

        return create

    def _called(self, original: Method) -> Method:
        def call(function: Method, *args: Nest, **kwargs: Nest) -> Nest:
            flat = tf.nest.flatten((args, kwargs), expand_composites=True)
            tensors = [value for value in flat if tf.is_tensor(value)]
            with replaced(self, "_calls", [*self._calls, (current_graph(), tensors)]):
                return original(function, *args, **kwargs)

        return call

    def _inverted(self, condition: Nest) -> Nest:
        condition = tf.convert_to_tensor(condition)  # it may be a variable
        if condition.dtype != tf.bool or not self._is_traced(condition):
            return condition
        for comparison in _comparisons(condition):
            if self._is_of_batch(comparison, condition):
                return condition ^ (self._next(_COMPARED.format(comparison.type)) & self._is_part)
        return condition ^ self._next() if self._is_of_state(condition) else condition

    def _next_branch(self, branch_index: tf.Tensor, branches: Nest, **_: Nest) -> tf.Tensor:
        if not self._is_traced(branch_index) or not self._is_of_state(branch_index):
            return branch_index
        with self.paused():
            return select_v2(self._next(), (branch_index + 1) % len(branches), branch_index)

    def _reflected(self, kind: str, inputs: dict[str, Nest]) -> dict[str, Nest]:
        """Returns inputs of which one may be on the other side of the second one, or of zero."""
        names = _KINKED[kind]
        for name, other in zip(names, reversed(names), strict=True):
            value = inputs[name]
            is_number = self._is_traced(value) and value.dtype.is_floating
            if is_number and self._is_of_whole_batch(value):
                with self.paused():
                    bound = tf.zeros_like(value) if other == name else inputs[other]
                    moved = value + tf.stop_gradient(2 * (bound - value))
                    is_moved = self._next(_COMPARED.format(kind)) & self._is_part
                    return {**inputs, name: select_v2(is_moved, moved, value)}
            if other != name and self._is_traced(value) and _is_size(value, inputs[other]):
                with self.paused():
                    step = tf.constant(1 if kind == "Maximum" else -1, value.dtype)
                    is_moved = self._next(_COMPARED.format(kind)) & self._is_part
                    return {**inputs, other: select_v2(is_moved, value + step, inputs[other])}
        return inputs

    def _is_traced(self, tensor: Nest) -> bool:
        return not self._is_paused and tf.is_symbolic_tensor(tensor)

    def _is_of_samples(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor depends on an argument."""
        origins = self._origins(tensor)
        return any(each.type == "Placeholder" and each is not self._chosen.op for each in origins)

    def _is_of_state(self, tensor: tf.Tensor) -> bool:
        """Returns whether a scalar depends on variables or random numbers, and on no sample."""
        kinds = {operation.type for operation in self._origins(tensor)}
        changes = any(k == "ReadVariableOp" or k.startswith("StatelessRandom") for k in kinds)
        return tensor.shape.rank == 0 and changes and not self._is_of_samples(tensor)

    def _is_of_batch(self, comparison: tf.Operation, condition: tf.Tensor) -> bool:
        """Returns whether a condition compares a number of the whole batch, or all samples.

        Whether there are any labels, or what kind they are, does not count.
        """
        both = first, second = comparison.inputs
        if first is second:  # of NaN
            return False
        if _is_size(first, second) or _is_size(second, first):
            return True
        is_of_numbers = any(map(self._is_of_whole_batch, both))
        if not (is_of_numbers or self._is_of_whole_batch(condition)):
            return False
        if any(each.type == "ReadVariableOp" for t in both for each in self._origins(t)):
            return True
        return is_of_numbers and not any(np.all(tf.get_static_value(t) == 0) for t in both)

    def _is_of_whole_batch(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor depends on samples, but has no axis of them; not if in doubt."""
        graph = tensor.graph
        while graph is not self._chosen.graph:
            if isinstance(graph, WhileBodyFuncGraph | WhileCondFuncGraph):  # perhaps of one sample
                return False
            graph = graph.outer_graph
        if not tensor.shape.is_fully_defined():
            return False
        origins = list(self._origins(tensor, beside=_OF_SHAPES))
        if any(operation.type == "PlaceholderWithDefault" for operation in origins):
            return False  # the number of a sample, in `tf.vectorized_map`
        arguments = (each for each in origins if each.type == "Placeholder")
        return any(a is not self._chosen.op and a.graph is self._chosen.graph for a in arguments)

    def _next(self, what: str = _TERM) -> tf.Tensor:
        switches = self._of_threads[threading.get_ident()]
        switches.append(what)
        is_on = tf.equal(self._chosen % _WITH_ALL_COMPARED, len(switches) - 1)
        return is_on if what == _TERM else is_on | (self._chosen >= _WITH_ALL_COMPARED)

    def _origins(self, tensor: tf.Tensor, beside: Collection[str] = ()) -> Iterator[tf.Operation]:
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
                outer = self._outside(operation) if operation.type == "Placeholder" else []
                if not outer:
                    yield operation
                waiting += outer or operation.inputs

    def _outside(self, placeholder: tf.Operation) -> list[Nest]:
        """Returns what an argument of an inner graph stands for, in the graph that calls it."""
        graph = placeholder.graph
        if outer := [outer for outer, inner in graph.captures if inner.op is placeholder]:
            return outer
        for caller, tensors in reversed(self._calls):
            if graph is not self._chosen.graph and graph.outer_graph is caller:
                kinds = (each for each in graph.get_operations() if each.type == "Placeholder")
                return [t for t, each in zip(tensors, kinds, strict=False) if each is placeholder]
        return []


def _is_size(tensor: tf.Tensor, bound: Nest) -> bool:
    """Returns whether a tensor is the number of samples, and compared with a constant above 2."""
    limit, operation = tf.get_static_value(bound), tensor.op
    if tensor.shape.rank != 0 or limit is None or np.ndim(limit) or limit <= 2:
        return False
    while operation.type in ("Cast", "Identity"):
        operation = operation.inputs[0].op
    if operation.type == "StridedSlice" and operation.inputs[0].op.type == "Shape":
        is_first = np.array_equal(tf.get_static_value(operation.inputs[1]), [0])
        return is_first and operation.inputs[0].op.inputs[0].shape[:1] == [None]
    return bool(operation.type == "Size" and operation.inputs[0].shape[:1] == [None])


def _comparisons(condition: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the comparisons that a condition consists of."""
    operation = condition.op
    if operation.type in _COMPARISONS:
        yield operation
    elif operation.type in _COMBINED:
        for tensor in operation.inputs:
            yield from _comparisons(tensor)
