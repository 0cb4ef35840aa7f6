"""Interception of scalars on their way to `Mean` metrics, which count a step of a worker once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TypeAlias

import keras
import tensorflow as tf

from lbbsp_tf.compat.values import PerThread, is_patched, patched

Handler: TypeAlias = "Callable[[tf.Tensor, tf.Tensor | None], tuple[tf.Tensor, tf.Tensor | None]]"

_handler = PerThread()


@contextmanager
def intercepted_scalars(handler: Handler) -> Iterator[None]:
    """Replaces each scalar in this thread's `Mean.update_state`, and its weight.

    Args:
        handler: Called as ``handler(value, sample_weight)``; returns both.
    """
    mean = keras.metrics.Mean
    if not is_patched(mean.update_state):
        mean.update_state = patched(_replacing(mean.update_state))
    with _handler.set(handler):
        yield


def scalars_weighted(weight: tf.Tensor) -> AbstractContextManager[None]:
    """Weights scalars without a sample weight in this thread's `Mean.update_state`."""
    return intercepted_scalars(lambda value, own: (value, weight if own is None else own))


def _replacing(update_state: Callable[..., None]) -> Callable[..., None]:
    @wraps(update_state)
    def replacing(
        self: keras.metrics.Mean, values: tf.Tensor, sample_weight: tf.Tensor | None = None
    ) -> None:
        handler = _handler.value
        if handler is not None and _is_scalar(values):
            values, sample_weight = handler(values, sample_weight)
        return update_state(self, values, sample_weight)

    return replacing


def _is_scalar(values: object) -> bool:
    return not isinstance(values, tf.RaggedTensor) and len(keras.ops.shape(values)) == 0
