"""Patches with which `fit`, `evaluate` and validation run under MultiWorkerMirroredStrategy.

Keras 3's `fit` does not run under that strategy (keras-team/keras#20585, open), because it calls
`strategy.reduce` twice with values that the strategy does not accept. Both calls need the local
value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from lbbsp_tf.compat.values import Nest, is_broken, local, patched


def patch_keras() -> None:
    """Makes `fit`, `evaluate` and validation run under MultiWorkerMirroredStrategy."""
    trainer = keras_trainer.TensorFlowTrainer
    build = getattr(trainer, "_maybe_symbolic_build", None)
    if build is not None and is_broken(build, "distribute_strategy.reduce("):
        trainer._maybe_symbolic_build = patched(_build_from_local_batch)
    reduce = getattr(keras_trainer, "reduce_per_replica", None)
    if reduce is not None and is_broken(reduce, 'strategy.reduce("MEAN", v, axis=0)'):
        keras_trainer.reduce_per_replica = patched(_reduce_locally(reduce))


def _build_from_local_batch(
    self: keras_trainer.TensorFlowTrainer, iterator: Nest = None, data_batch: Nest = None
) -> None:
    """Builds the model; replaces `_maybe_symbolic_build`, which reduces a tuple of values."""
    if self._distribute_strategy is None:
        return
    if iterator is not None:
        # Placeholders hand out their example, because only a training step may iterate over them.
        example = getattr(iterator._get_iterator(), "example", None)
        if example is not None:
            data_batch = example()
        else:
            _, _, batches = next(iter(iterator))
            data_batch = local(self.distribute_strategy, next(batches))
    with self.distribute_strategy.scope():
        self._symbolic_build(data_batch=data_batch)


def _reduce_locally(reduce: Callable[..., Nest]) -> Callable[..., Nest]:
    """Wraps `reduce_per_replica`, which averages scalars over an axis that they do not have."""

    @wraps(reduce)
    def reduce_per_replica(values: Nest, strategy: tf.distribute.Strategy, reduction: str) -> Nest:
        if reduction == "auto" and keras_trainer._collective_all_reduce_multi_worker(strategy):
            return local(strategy, values)
        return reduce(values, strategy, reduction)

    return reduce_per_replica
