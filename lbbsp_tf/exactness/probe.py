"""Gradients of a train step on parts of a batch, computed without any change of state.

Gradients are not kept but projected: each variable's gradient G becomes ``(u^T G v, u'^T G v')``
for fixed vectors, in addition to its norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lbbsp_tf import compat
from lbbsp_tf.compat import Apply, Gradient, Gradients, Nest

Sketch = npt.NDArray[np.float64]
"""Two projections and the norm of each gradient of an `apply`, shape ``(variables, 3)``."""


class Written(NamedTuple):
    """Variable that a function may write, with its values before and after a run.

    Args:
        name: Name of the variable, which in Keras is its path.
        is_local: Whether each worker keeps a value of its own, as metrics do.
        before: Value before the run.
        after: Value after the run.
    """

    name: str
    is_local: bool
    before: npt.NDArray[np.generic]
    after: npt.NDArray[np.generic]


COARSE_FLOOR = 1e-3
"""Fraction of the largest gradient below which a gradient may consist of rounding only."""

_READS = frozenset({"ReadVariableOp", "VarIsInitializedOp", "VariableShape", "ResourceGather"})
_CHOOSING = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
"""Operations whose first input chooses a function, of which the others are the arguments."""


class Probe:
    """Function of a replica that returns sketches, run without any change of state.

    Every worker must create and call it at the same time: variables that the workers share are
    written by collectives.

    Args:
        strategy: Strategy of the model.
        function: Called in a replica with scalar tensors; returns a nest of tensors.
        patches: Called with the scalars; the function runs inside the context that it returns.
        signature: Types of the scalars.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        function: Callable[..., Nest],
        patches: Callable[..., AbstractContextManager[None]],
        signature: Sequence[tf.DType] = (),
    ) -> None:
        share_seed = compat.shared_global_seed(strategy)

        def replica(*scalars: tf.Tensor) -> Nest:
            share_seed()
            with compat.fresh_traces():
                return function(*scalars)

        def run(*scalars: tf.Tensor) -> Nest:
            # Here, as replicas are traced in turns, in their own threads.
            with patches(*scalars), compat.without_outputs():
                return compat.local(strategy, strategy.run(replica, args=scalars))

        specs = [tf.TensorSpec([], dtype) for dtype in signature]
        graph_function = tf.function(run, input_signature=specs, autograph=False)
        self._signature = signature
        self._function = graph_function.get_concrete_function()
        self.outputs: Nest = self._function.structured_outputs
        self._written = list(_written_variables(self._function.graph))
        self._trained = [v for v in self._function.graph.variables if v.trainable]

    def run(self, *scalars: float) -> tuple[Nest, list[Written]]:
        """Returns the function's result as NumPy arrays of float64, and what it has written."""
        before = [variable.read_value() for variable in self._written]
        written = []
        try:
            result = self._function(*map(tf.constant, scalars, self._signature))
        finally:
            for variable, value in zip(self._written, before, strict=True):
                is_local = variable.synchronization == tf.VariableSynchronization.ON_READ
                name = variable.name.removesuffix(":0")
                after = variable.read_value().numpy()
                written.append(Written(name, is_local, value.numpy(), after))
                variable.assign(value)
        return tf.nest.map_structure(lambda t: t.numpy().astype(np.float64), result), written

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        """Changes the weights by a tenth inside the context, and those that are zero to 0.1.

        All workers change them alike.
        """
        before = [variable.read_value() for variable in self._trained]
        try:
            for variable, value in zip(self._trained, before, strict=True):
                size = tf.norm(value) / tf.sqrt(tf.cast(tf.size(value), value.dtype))
                waves: tf.Tensor = same_for_all_samples(value)
                variable.assign(value + 0.1 * waves * tf.where(size > 0, size, tf.ones_like(size)))
            yield
        finally:
            for variable, value in zip(self._trained, before, strict=True):
                variable.assign(value)


def deviation(sketch: Sketch, expected: Sketch) -> float:
    """Returns the largest difference, relative to gradients that are at least `COARSE_FLOOR`."""
    norms = np.abs(sketch[:, 2])
    differences = np.abs(sketch[:, :2] - expected[:, :2]).max(axis=1)
    reference = np.maximum(norms, COARSE_FLOOR * norms.max())
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.max(np.where(differences > 0, differences / reference, 0.0)))


def sketch_of(gradients: Gradients) -> tf.Tensor:
    """Returns two projections and the norm of each gradient, shape ``(variables, 3)``.

    They are of float64 if all gradients are, else of float32.
    """
    is_double = all(g is None or g.dtype == tf.float64 for g in gradients)
    dtype = tf.float64 if is_double else tf.float32
    return tf.stack([_project(gradient, dtype) for gradient in gradients])


def _project(gradient: Gradient, dtype: tf.DType) -> tf.Tensor:
    if gradient is None:
        return tf.zeros(3, dtype)
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = gradient.values, tf.cast(gradient.indices, tf.int64)
    else:
        values = tf.convert_to_tensor(gradient)
        values = values if values.shape.rank else values[None]
        indices = tf.range(tf.shape(values, tf.int64)[0])
    matrix = tf.cast(tf.reshape(values, [tf.shape(values)[0], -1]), dtype)
    columns = tf.range(tf.shape(matrix, tf.int64)[1])
    dots = [
        tf.tensordot(
            _waves(indices, a, dtype), tf.linalg.matvec(matrix, _waves(columns, b, dtype)), 1
        )
        for a, b in ((1.3, 2.1), (0.7, 1.7))
    ]
    return tf.stack([*dots, tf.norm(matrix)])


def _waves(numbers: tf.Tensor, frequency: float, dtype: tf.DType) -> tf.Tensor:
    """Returns the entries of a fixed vector; with a period, because large cosines are inexact."""
    return tf.cos(frequency * tf.cast(numbers % 9973, dtype) + 0.5)


def same_for_all_samples(gradient: Gradient) -> Gradient:
    """Returns a gradient of the same kind and shape that does not depend on samples."""
    if gradient is None:
        return None
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    shape = gradient.dense_shape if is_sparse else tf.shape(gradient)
    numbers = tf.range(tf.reduce_prod(tf.cast(shape, tf.int64)))
    values = tf.reshape(_waves(numbers, 1.3, gradient.dtype), shape)
    return tf.IndexedSlices(values, tf.range(shape[0]), shape) if is_sparse else values


def _written_variables(graph: tf.Graph) -> Iterator[tf.Variable]:
    """Yields the variables that a function may write: that other operations than reads take."""
    written = {id(outer) for outer, inner in graph.captures if _is_written(inner)}
    return (variable for variable in graph.variables if id(variable.handle) in written)


def _is_written(handle: tf.Tensor) -> bool:
    """Returns whether any operation may write the variable of a handle, also in loops."""
    return handle.dtype == tf.resource and any(
        _writes(operation, place)
        for operation in handle.consumers()
        for place, tensor in enumerate(operation.inputs)
        if tensor is handle
    )


def _writes(operation: tf.Operation, place: int) -> bool:
    if operation.type == "Identity":
        return _is_written(operation.outputs[0])
    called = [value.func.name for value in operation.node_def.attr.values() if value.func.name]
    place -= operation.type in _CHOOSING
    functions = [operation.graph._get_function(name) for name in called]
    if functions and None not in functions:
        return any(_is_written(function.graph.inputs[place]) for function in functions)
    return operation.type not in _READS


def sketches_as_one_process(
    train_step: Callable[[Nest], Nest],
    batch: Nest,
    *patches: AbstractContextManager[None],
    summed: Callable[[Gradient], Gradient] = lambda gradient: gradient,
) -> list[tf.Tensor]:
    """Runs a train step without collectives, as a single process would, and applies nothing.

    Call it in a replica, in the function of a `Probe`. It returns a sketch of the gradients of each
    `apply` and `sum_gradients`, which returns what `summed` returns for each gradient.
    """
    sketches: list[tf.Tensor] = []

    def keep(gradients: Gradients, apply: Apply) -> Gradients:
        sketches.append(sketch_of(gradients))
        return [summed(gradient) for gradient in gradients]

    context = tf.distribute.get_replica_context()
    alone = compat.replaced(context, "all_reduce", lambda op, value, options=None: value)
    with ExitStack() as stack:
        for patch in (*patches, compat.intercepted_apply(keep), alone):
            stack.enter_context(patch)
        train_step(batch)
    return sketches
