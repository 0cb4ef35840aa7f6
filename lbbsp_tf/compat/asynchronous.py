"""Patches for asynchronous steps, which change the same variables at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import keras
import tensorflow as tf

from lbbsp_tf.compat.values import replaced


@contextmanager
def without_metrics(model: keras.Model, losses: list[tf.Tensor]) -> Iterator[None]:
    """Prevents `train_step` from updating metrics, and appends its losses to a list.

    Metrics are read, changed and written back in separate operations. If steps on different
    workers ran at the same time, only one of them would be counted.
    """
    compute_loss = model.compute_loss

    def appending(*args: object, **kwargs: object) -> tf.Tensor:
        losses.append(compute_loss(*args, **kwargs))
        return losses[-1]

    with ExitStack() as stack:
        stack.enter_context(replaced(model, "compute_loss", appending))
        stack.enter_context(replaced(model, "compute_metrics", lambda *_, **__: {}))
        tracker = getattr(model, "_loss_tracker", None)
        if tracker is not None:
            stack.enter_context(replaced(tracker, "update_state", lambda *_, **__: None))
        yield


@contextmanager
def atomic_iterations(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes `optimizer.apply` count its calls in one operation.

    Keras reads the count, adds one and assigns the sum in separate operations. In a test it
    counted 159 of 200 asynchronous steps on two workers.
    """
    count = optimizer.iterations
    with replaced(count, "assign_add", lambda value: count.value.assign_add(value)):
        yield
