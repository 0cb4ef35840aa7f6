"""Patches with which `fit`, `evaluate` and validation run under MultiWorkerMirroredStrategy.

Keras 3's `fit` does not run under that strategy (keras-team/keras#20585, open), because it calls
`strategy.reduce` twice with values that the strategy does not accept. Both calls need the local
value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.epoch_iterator import EpochIterator

from lbbsp_tf.compat.evaluation import spec_of_rows
from lbbsp_tf.compat.values import Nest, is_broken, is_patched, local, patched


def patch_keras() -> None:
    """Makes `fit`, `evaluate` and validation run under MultiWorkerMirroredStrategy."""
    trainer = keras_trainer.TensorFlowTrainer
    build = getattr(trainer, "_maybe_symbolic_build", None)
    if build is not None and is_broken(build, "distribute_strategy.reduce("):
        trainer._maybe_symbolic_build = patched(_build_from_local_batch)
    reduce = getattr(keras_trainer, "reduce_per_replica", None)
    if reduce is not None and is_broken(reduce, 'strategy.reduce("MEAN", v, axis=0)'):
        keras_trainer.reduce_per_replica = patched(_reduce_locally(reduce))
    if not is_patched(trainer.get_metrics_result):
        trainer.get_metrics_result = patched(_reading_variables(trainer.get_metrics_result))
    if not is_patched(EpochIterator.__init__):
        EpochIterator.__init__ = patched(_without_shuffle_warning(EpochIterator.__init__))


def _build_from_local_batch(
    self: keras_trainer.TensorFlowTrainer, iterator: Nest = None, data_batch: Nest = None
) -> None:
    """Builds the model; replaces `_maybe_symbolic_build`, which reduces a tuple of values."""
    if self._distribute_strategy is None:
        return
    spec = spec_of_rows(iterator)
    if spec is not None:
        data_batch = spec  # a batch may not be available a second time
    elif iterator is not None:
        # Placeholders hand out their example, because only a training step may iterate over them.
        example = getattr(iterator._get_iterator(), "example", None)
        if example is not None:
            data_batch = example()
        else:
            _, _, batches = next(iter(iterator))
            data_batch = local(self.distribute_strategy, next(batches))
    with self.distribute_strategy.scope():
        _build(self, data_batch)


def require_targets(model: keras.Model, batch: Nest) -> None:
    """Raises an error if Keras would compute the loss of a model without targets."""
    trainer = keras_trainer.TensorFlowTrainer
    is_stock = all(
        getattr(type(model), name) is getattr(trainer, name)
        for name in ("train_step", "compute_loss")
    )
    targets = keras.utils.unpack_x_y_sample_weight(batch)[1]
    if is_stock and targets is None and getattr(model, "_compile_loss", None) is not None:
        raise ValueError(
            "the model was compiled with a loss, and the data have no targets y: pass them, as in "
            "balancer.dataset(x, y), or let the elements of the data set be (x, y)"
        )


def _build(model: keras_trainer.TensorFlowTrainer, data_batch: Nest) -> None:
    """Builds the model symbolically, or leaves it to a custom `train_step`.

    The step of a VAE, a GAN or a distillation trains layers that the model holds, and the model
    itself cannot be called. What is not built yet is then created when the step is traced.
    """
    require_targets(model, data_batch)
    has_step = type(model).train_step is not keras_trainer.TensorFlowTrainer.train_step
    if not has_step or type(model).call is not keras.Model.call:
        try:
            model._symbolic_build(data_batch=data_batch)
            return
        except Exception:
            if not has_step:  # a fixed size of batches is named later, by the proof
                any_size = tf.nest.map_structure(
                    lambda rows: tf.TensorSpec([None, *rows.shape[1:]], rows.dtype), data_batch
                )
                model._symbolic_build(data_batch=any_size)
                return
    layers = model._flatten_layers(include_self=False)
    if model.optimizer is not None and all(layer.built for layer in layers):
        model.optimizer.build(model.trainable_variables)


def build(model: keras.Model, batch: Nest) -> None:
    """Builds what is not built yet of a model, its optimizer and its metrics."""
    with model.distribute_strategy.scope():
        _build(model, batch)


def _reduce_locally(reduce: Callable[..., Nest]) -> Callable[..., Nest]:
    """Wraps `reduce_per_replica`, which averages scalars over an axis that they do not have."""

    @wraps(reduce)
    def reduce_per_replica(values: Nest, strategy: tf.distribute.Strategy, reduction: str) -> Nest:
        if reduction == "auto" and keras_trainer._collective_all_reduce_multi_worker(strategy):
            return local(strategy, values)
        return reduce(values, strategy, reduction)

    return reduce_per_replica


def _reading_variables(original: Callable[..., Nest]) -> Callable[..., Nest]:
    """Wraps `get_metrics_result`, in which a metric may return its variable.

    Under a strategy this is a distributed variable, which the progress bar cannot convert.
    """

    @wraps(original)
    def get_metrics_result(self: keras_trainer.TensorFlowTrainer) -> Nest:
        return keras.tree.map_structure(
            lambda value: tf.convert_to_tensor(value) if isinstance(value, tf.Variable) else value,
            original(self),
        )

    return get_metrics_result


def _without_shuffle_warning(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of Keras's iterator over epochs.

    Keras warns for data sets that it ignores ``shuffle=True``, which is the default of `fit`.
    """

    @wraps(original)
    def initialise(self: EpochIterator, x: Nest, *args: object, **options: object) -> None:
        balanced = isinstance(x, tf.data.Dataset) and hasattr(x, "pipeline")  # on a single worker
        if balanced or isinstance(x, tf.distribute.DistributedDataset):
            options["shuffle"] = False
        original(self, x, *args, **options)

    return initialise
