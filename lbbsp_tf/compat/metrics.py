"""Weight of scalars in `Mean` metrics, so that workers with unequal batches count accordingly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import keras
import tensorflow as tf

from lbbsp_tf.compat.values import PerThread, is_patched, patched

_weight = PerThread()


@contextmanager
def scalars_weighted(weight: tf.Tensor) -> Iterator[None]:
    """Weights scalars without a sample weight in this thread's `Mean.update_state`.

    A train step's own metric, ``tracker.update_state(loss)``, counts a step of one process once.
    The weights of all workers sum to 1, so that it counts a step of the job once as well.
    """
    mean = keras.metrics.Mean
    if not is_patched(mean.update_state):
        mean.update_state = patched(_weighting(mean.update_state))
    with _weight.set(weight):
        yield


def _weighting(update_state: Callable[..., None]) -> Callable[..., None]:
    @wraps(update_state)
    def weighted(
        self: keras.metrics.Mean, values: tf.Tensor, sample_weight: tf.Tensor | None = None
    ) -> None:
        weight = _weight.value
        if weight is not None and sample_weight is None and _is_scalar(values):
            sample_weight = weight
        return update_state(self, values, sample_weight)

    return weighted


def _is_scalar(values: object) -> bool:
    return not isinstance(values, tf.RaggedTensor) and len(keras.ops.shape(values)) == 0
