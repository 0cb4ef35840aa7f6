"""Inventory of the patches of Keras and TensorFlow: which ones these versions need.

A patch is applied where its feature is found. So the inventory applies each of them, and looks
whether its targets have been replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as loss_module
from keras.src.random.seed_generator import SeedGenerator
from keras.src.trainers.epoch_iterator import EpochIterator
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)
from tensorflow.python.distribute.distribute_lib import StrategyBase
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import function_context

from lbbsp_tf import compat
from lbbsp_tf.compat.state import patch_epochs
from lbbsp_tf.compat.values import is_patched

_NOT_NEEDED = "this version does not need it"
_NEEDS_TIMEOUTS = "it needs TensorFlow 2.19 or later, whose coordination service has time limits"


class Patch(NamedTuple):
    """One patch."""

    purpose: str
    apply: Callable[[], object]  # to this whole process, or inside the context that it returns
    owner: Any = None  # class or module
    names: tuple[str, ...] = ()  # attributes that it replaces; none if only inside the context
    unless: str = ""  # what it means if they are left as they are; empty if all versions need it


class State(NamedTuple):
    """State of a patch in this process."""

    purpose: str
    is_right: bool  # in place, or not needed
    text: str


def inventory() -> Iterator[State]:
    """Applies all patches to this process, which must not train, and returns their states."""
    return map(state_of, _patches())


def state_of(patch: Patch) -> State:
    """Applies a patch to this process, and returns its state."""
    try:
        applied = patch.apply()
        if isinstance(applied, AbstractContextManager):
            with applied:
                pass
    except Exception as error:  # what it changes is not there, or different
        reason = f"{type(error).__name__}: {error}"
        return State(patch.purpose, False, f"cannot be applied: {reason}")
    return _state(patch)


def _state(patch: Patch) -> State:
    if not patch.names:
        return State(patch.purpose, True, "needed; applied while a fit is prepared")
    missing = [name for name in patch.names if not hasattr(patch.owner, name)]
    if missing:
        where = f"{patch.owner.__name__}.{missing[0]}"
        return State(patch.purpose, False, f"not in place: there is no {where} any more")
    if all(_is_replaced(getattr(patch.owner, name)) for name in patch.names):
        return State(patch.purpose, True, "needed, and in place")
    if patch.unless:
        return State(patch.purpose, True, f"not in place: {patch.unless}")
    return State(patch.purpose, False, "needed, but not in place")


def _is_replaced(attribute: object) -> bool:
    return is_patched(attribute.fget if isinstance(attribute, property) else attribute)


def _patches() -> tuple[Patch, ...]:
    trainer, iterator = keras_trainer.TensorFlowTrainer, keras_trainer.TFEpochIterator
    row = tf.zeros((1, 1))
    evaluation = partial(compat.patch_evaluation, *[lambda *_: None] * 4)
    return (
        Patch("build models under a strategy", compat.patch_keras, trainer,
              ("_maybe_symbolic_build",), _NOT_NEEDED),
        Patch("logs of a step under a strategy", compat.patch_keras, keras_trainer,
              ("reduce_per_replica",), _NOT_NEEDED),
        Patch("metrics that return variables", compat.patch_keras, trainer,
              ("get_metrics_result",)),
        Patch("epochs: checkpoints, no warning of shuffle", patch_epochs, EpochIterator,
              ("__init__", "_enumerate_iterator")),
        Patch("conditional updates of optimizers", compat.allow_conditional_updates, TFOptimizer,
              ("_backend_apply_gradients",), _NOT_NEEDED),
        Patch("moments of synchronised batch normalisation", compat.synchronize_moments,
              keras.layers.BatchNormalization, ("_moments",), _NOT_NEEDED),
        Patch("evaluation on any number of rows", evaluation, iterator,
              ("__init__", "catch_stop_iteration")),
        Patch("test and predict functions", evaluation, trainer,
              ("make_test_function", "make_predict_function", "predict_on_batch",
               "_get_metrics_result_or_logs")),
        Patch("files written once per job", lambda: compat.write_once_per_job(1), keras.Model,
              ("save", "save_weights")),
        Patch("gradients before `apply`", lambda: compat.intercepted_apply(lambda *_: None),
              keras.optimizers.Optimizer, ("apply",)),
        Patch("one replica in the user's code", compat.one_replica_view, StrategyBase,
              ("num_replicas_in_sync",)),
        Patch("means over tokens", lambda: compat.token_means_scaled(lambda tokens, _: tokens),
              loss_module, ("apply_mask", "reduce_values")),
        Patch("vectors of `add_loss`", lambda: compat.added_vectors_scaled(tf.ones(()), row),
              trainer, ("_aggregate_additional_loss",)),
        Patch("scalars of metrics", lambda: compat.intercepted_scalars(lambda *both: both),
              keras.metrics.Mean, ("update_state",)),
        Patch("gradients of tapes", lambda: compat.intercepted_gradients(lambda *_: None),
              tf.GradientTape, ("gradient",)),
        Patch("noise of each replica", lambda: compat.noise_of_replica(0), SeedGenerator,
              ("next",)),
        Patch("traces of each step", compat.fresh_traces, function_context,
              ("make_function_context",)),
        Patch("proof of the loss: noise", compat.noise_alike_for_all_samples),
        Patch("proof of the loss: batch normalisation", compat.batch_norm_in_inference),
        Patch("patience with silent workers", compat.be_patient, context.Context,
              ("configure_coordination_service",), _NEEDS_TIMEOUTS),
        Patch("variables compared by name", compat.compare_variables, CollectiveAllReduceExtended,
              ("_get_variable_creator_initial_value",), _NEEDS_TIMEOUTS),
    )  # fmt: skip
