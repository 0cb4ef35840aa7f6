"""Interception of `Optimizer.apply`, wherever a model keeps its optimizers; sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias
from weakref import WeakSet

import keras
import tensorflow as tf
from keras.optimizers import Optimizer
from keras.src.backend.tensorflow.optimizer import TFOptimizer

from lbbsp_tf.compat.tracing import current_graph
from lbbsp_tf.compat.values import Method, Nest, PerThread, patch

TensorLike: TypeAlias = "tf.Tensor | tf.IndexedSlices"
Gradient: TypeAlias = "TensorLike | None"
Gradients: TypeAlias = "Sequence[Gradient]"
Apply: TypeAlias = "Callable[[Gradients], None] | None"

_steps_in_progress: list[object] = []


def _outermost_to_handler(
    handler: Method, apply: Method, self: Optimizer, grads: Gradients, *args: Nest, **kw: Nest
) -> None:
    def proceed(gradients: Gradients) -> None:
        # An optimizer that wraps others applies theirs, which is not the outermost any more.
        with _handler(None):
            apply(self, gradients, *args, **kw)

    handler(list(grads), proceed)


_OWNERS = {  # classes of Keras that have a method of their own
    owner
    for kind in vars(keras.optimizers).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer)
    for owner in kind.__mro__
    if "apply" in vars(owner)
}
_handler = PerThread(*((owner, "apply", _outermost_to_handler) for owner in _OWNERS))


@contextmanager
def intercepted_apply(handler: Callable[[Gradients, Apply], Gradients]) -> Iterator[None]:
    """Passes the gradients of outermost `apply` and `sum_gradients` in this thread to a handler.

    Optimizers do not reduce gradients over replicas inside the context. ``handler(gradients,
    apply)`` calls ``apply(gradients)`` to continue with the optimizer's own method; it is None in
    `sum_gradients`, which returns what the handler returns.
    """
    patch(TFOptimizer, "_all_reduce_sum_gradients", _unless_intercepted)
    graph = current_graph()

    def in_this_graph(gradients: Gradients, apply: Apply) -> Gradients:
        if current_graph() is not graph:
            raise ValueError(
                f"{'optimizer.apply' if apply else 'sum_gradients'} is called in a tf.function, "
                "tf.cond or tf.while_loop inside the train step, where gradients cannot be summed "
                "over workers: let the train step call it itself, in every step (to apply "
                "accumulated gradients every few steps, pass gradient_accumulation_steps to the "
                "optimizer)"
            )
        return handler(gradients, apply)

    _steps_in_progress.append(handler)
    try:
        with _handler(in_this_graph):
            yield
    finally:
        _steps_in_progress.remove(handler)


_applied: WeakSet[Optimizer] = WeakSet()


def note_optimizers() -> WeakSet[Optimizer]:
    """Returns a set to which optimizers are added when steps that apply them are run or traced."""

    def noted(update: Method, self: Optimizer, *args: Nest, **kw: Nest) -> None:
        _applied.add(self)
        update(self, *args, **kw)

    patch(TFOptimizer, "_backend_update_step", noted)
    _applied.clear()
    return _applied


def sum_gradients(gradients: Nest) -> Nest:
    """Returns the sums of gradients over replicas; in no step, the gradients as they are."""
    if _handler.value is None:
        return gradients
    summed = _handler.value(keras.tree.flatten(gradients), None)
    return keras.tree.pack_sequence_as(gradients, list(summed))


def _unless_intercepted(reduce: Method, optimizer: Optimizer, grads_and_vars: Nest) -> Nest:
    # Not by thread: a wrapping optimizer may apply the inner one in other threads.
    return list(grads_and_vars) if _steps_in_progress else reduce(optimizer, grads_and_vars)
