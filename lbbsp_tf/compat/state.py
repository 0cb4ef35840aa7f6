"""State of a fit in Keras that has no public interface: callbacks, logs, epochs, variables."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers.epoch_iterator import EpochIterator

from lbbsp_tf.compat.values import Array, Method, Nest, PerThread, patch

_CALLBACK_STATE: Mapping[type[keras.callbacks.Callback], tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: (
        "wait", "stopped_epoch", "best", "best_epoch", "best_weights",
    ),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: (
        "best", "_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch",
    ),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
}  # fmt: skip
"""Attributes in which Keras's callbacks keep what they have seen."""

Callbacks: TypeAlias = "list[keras.callbacks.Callback]"

_iterator = PerThread()
_callbacks = PerThread()
_FIRST = "_lbbsp_first_batch"
_LAST_ROWS = "_lbbsp_last_rows"
_HOOKS_WITH_LOGS = ("on_train_batch_end", "on_epoch_end")

Values = Callable[[], Mapping[str, float]]


def patch_epochs() -> None:
    """Makes the iterator over epochs and the callbacks of a fit known to the balancer."""
    patch(EpochIterator, "__init__", _noted)
    patch(EpochIterator, "_enumerate_iterator", _from_first_batch)
    patch(keras.callbacks.CallbackList, "on_train_begin", _with_callbacks_noted)


def latest_epochs() -> EpochIterator | None:
    """Returns the iterator that was created last in this thread: that of a fit that begins."""
    return _iterator.value and _iterator.value()


def start_at_batch(epochs: EpochIterator, batch: int) -> None:
    """Makes the next epoch of an iterator begin at a batch other than its first one."""
    setattr(epochs, _FIRST, batch)


def running_callbacks() -> Callbacks:
    """Returns all callbacks of the fit whose `on_train_begin` is running in this thread."""
    return getattr(_callbacks.value, "callbacks", [])


def running_list() -> keras.callbacks.CallbackList | None:
    """Returns the list of these callbacks; None if there is no such fit."""
    return _callbacks.value


def add_to_logs(callbacks: keras.callbacks.CallbackList, step: Values, epoch: Values) -> None:
    """Adds values to the logs of each step and each epoch of a fit, for all of its callbacks.

    A callback can change the logs only for those after it in the list; the user's may come first.
    """
    for name, values in zip(_HOOKS_WITH_LOGS, (step, epoch), strict=True):
        hook = getattr(type(callbacks), name)
        setattr(callbacks, name, partial(_with_values, values, hook, callbacks))


def stop_adding(callbacks: keras.callbacks.CallbackList) -> None:
    """Restores a list of callbacks, which its user may pass to another fit."""
    for name in _HOOKS_WITH_LOGS:
        vars(callbacks).pop(name, None)


def _with_values(values: Values, hook: Method, fit: Nest, number: int, logs: Any = None) -> None:
    logs = logs or {}
    hook(fit, number, {**logs, **values(), **logs})  # a metric of the user keeps its value


def last_rows(model: keras.Model) -> int:
    """Returns the number of rows of this worker in the last step of `model`; 1 if unknown."""
    return int(getattr(model, _LAST_ROWS, 1))


def set_last_rows(model: keras.Model, rows: int | tf.Tensor) -> None:
    """Stores the number of rows of this worker in a step of `model`."""
    object.__setattr__(model, _LAST_ROWS, rows)


def callback_states(callbacks: Callbacks) -> list[tuple[str, dict[str, object]]]:
    """Returns what Keras's own callbacks have seen, with the names of their classes."""
    return [
        (kind.__name__, {name: getattr(callback, name) for name in names})
        for callback, kind, names in _stateful(callbacks)
    ]


def restore_callbacks(
    callbacks: Callbacks, states: Sequence[tuple[str, Mapping[str, object] | None]]
) -> None:
    """Restores what `callback_states` has returned, to the same callbacks in the same order."""
    stateful = list(_stateful(callbacks))
    if [kind for kind, _ in states] == [kind.__name__ for _, kind, _ in stateful]:
        for (callback, _, names), (_, values) in zip(stateful, states, strict=True):
            if values is not None:  # else it is left as it is
                for name in names:
                    setattr(callback, name, values[name])


def is_mirrored(variable: keras.Variable) -> bool:
    """Returns whether the strategy keeps a variable equal on all replicas."""
    synchronization = getattr(variable.value, "synchronization", None)
    return bool(synchronization != tf.VariableSynchronization.ON_READ)


def assign_total(
    strategy: tf.distribute.Strategy, variable: keras.Variable, value: Array, *, sends: bool
) -> None:
    """Assigns a value that was read over all replicas; a sum, only where `sends` is true."""
    is_sum = getattr(variable.value, "aggregation", None) == tf.VariableAggregation.SUM
    if is_mirrored(variable) or not is_sum:
        variable.assign(value)
        return
    parts = strategy.experimental_local_results(variable.value)
    for part, total in zip(parts, [sends, *[False] * len(parts)], strict=False):
        part.assign(value if total else np.zeros_like(value))


def global_random_state() -> keras.Variable:
    """Returns the state of Keras's global random generator."""
    return global_seed_generator().state


def _stateful(
    callbacks: Callbacks,
) -> Iterator[tuple[keras.callbacks.Callback, type, tuple[str, ...]]]:
    for callback in callbacks:
        for kind, names in _CALLBACK_STATE.items():
            if isinstance(callback, kind) and all(hasattr(callback, name) for name in names):
                yield callback, kind, names


def _from_first_batch(enumerate_iterator: Method, epochs: EpochIterator) -> Nest:
    """Replaces the generator of an epoch, which always counts from batch 0."""
    batches = enumerate_iterator(epochs)
    for _ in range(vars(epochs).pop(_FIRST, 0)):
        next(batches)  # draws nothing: the step does
    yield from batches


def _noted(
    initialise: Method, self: EpochIterator, x: Nest, *args: object, **options: object
) -> None:
    """Notes a new iterator over epochs, which is not to warn that it ignores ``shuffle=True``.

    That is the default of `fit`. Placeholders, which are endless, tell the number of steps.
    """
    distributed = isinstance(x, tf.distribute.DistributedDataset)
    is_data = distributed or isinstance(x, tf.data.Dataset)
    pipeline = getattr(x, "pipeline", None) if is_data else None  # of data of the balancer
    if pipeline or distributed:
        options["shuffle"] = False
    size = options.get("batch_size")
    if pipeline and size not in (None, pipeline.order.global_batch_size):  # Keras ignores it
        raise ValueError(
            "batch_size must be the global_batch_size = "
            f"{pipeline.order.global_batch_size} of the balancer, got {size}: leave batch_size out"
        )
    if distributed and options.get("steps_per_epoch") is None:
        options["steps_per_epoch"] = getattr(x, "steps_per_epoch", None)
    initialise(self, x, *args, **options)
    _iterator.value = weakref.ref(self)


def _with_callbacks_noted(
    on_train_begin: Method, callbacks: keras.callbacks.CallbackList, logs: Nest = None
) -> None:
    with _callbacks(callbacks):
        on_train_begin(callbacks, logs)
