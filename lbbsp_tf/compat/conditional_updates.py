"""Patch with which optimizers may update variables in only some of the steps.

Gradient accumulation and ``ema_overwrite_frequency`` update variables inside a branch of
`keras.ops.cond`. Under a strategy, an update leaves the replica context (`merge_call`), which
TensorFlow forbids in a branch that starts in the replica context. Here the branch starts in the
cross-replica context instead, and each replica re-enters its own context inside it, as
`LossScaleOptimizer` does in Keras itself. The branches are Keras's own code, so that every
optimizer does what it does in one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, SimpleNamespace

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer

from lbbsp_tf.compat.values import Method, Nest, patch_broken


def allow_conditional_updates() -> None:
    """Makes gradient accumulation and ``ema_overwrite_frequency`` run under a strategy."""
    patch_broken(TFOptimizer, "_backend_apply_gradients", "ops.cond(", _apply_gradients)


def _apply_gradients(apply: Method, *args: object, **options: object) -> None:
    in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if in_replica and not tf.__internal__.distribute.strategy_supports_no_merge_call():
        apply = _with_cond_of_replicas(apply)
    apply(*args, **options)


@functools.cache
def _with_cond_of_replicas(apply: FunctionType) -> FunctionType:
    """Returns Keras's own code, which sees another `ops.cond`."""
    ops = SimpleNamespace(**{**vars(keras.ops), "cond": _cond_of_replicas})
    names = {**apply.__globals__, "ops": ops}
    return FunctionType(
        apply.__code__, names, apply.__name__, apply.__defaults__, apply.__closure__
    )


def _cond_of_replicas(
    pred: tf.Tensor, true_fn: Callable[[], object], false_fn: Callable[[], object]
) -> None:
    """Runs one of two branches in a replica, on all replicas alike; both may leave its context."""

    def across_replicas(
        strategy: tf.distribute.Strategy, preds: Nest, true_fns: Nest, false_fns: Nest
    ) -> None:
        def branch(functions: Nest) -> Callable[[], None]:
            return lambda: strategy.extended.call_for_each_replica(_call, args=(functions,))

        first = strategy.experimental_local_results(preds)[0]
        keras.ops.cond(first, branch(true_fns), branch(false_fns))

    tf.distribute.get_replica_context().merge_call(across_replicas, args=(pred, true_fn, false_fn))


def _call(function: Callable[[], Nest]) -> None:
    function()
