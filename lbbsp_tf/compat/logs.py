"""Figures in the logs that the callbacks of a fit see."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import keras

from lbbsp_tf.compat.values import Nest

Values = Callable[[], Mapping[str, float]]

_HOOKS = ("on_train_batch_end", "on_epoch_end")


def add_to_logs(callbacks: keras.callbacks.CallbackList, step: Values, epoch: Values) -> None:
    """Adds values to the logs of each step and each epoch of a fit, for all of its callbacks.

    A callback can change the logs only for those after it in the list; the user's may come first.
    """
    for name, values in zip(_HOOKS, (step, epoch), strict=True):
        setattr(callbacks, name, _adding(callbacks, name, values))


def stop_adding(callbacks: keras.callbacks.CallbackList) -> None:
    """Restores a list of callbacks, which its user may pass to another fit."""
    for name in _HOOKS:
        vars(callbacks).pop(name, None)


def _adding(
    callbacks: keras.callbacks.CallbackList, name: str, values: Values
) -> Callable[..., None]:
    hook = getattr(type(callbacks), name)

    def add(number: int, logs: Nest = None) -> None:
        logs = dict(logs or {})  # a copy: Keras compares those of the step with the metrics
        for key, value in values().items():
            logs.setdefault(key, value)  # not in place of a metric of the user
        hook(callbacks, number, logs)

    return add
