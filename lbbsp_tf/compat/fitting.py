"""Patches with which `fit`, `evaluate` and validation run under MultiWorkerMirroredStrategy.

Keras 3's `fit` does not run under that strategy (keras-team/keras#20585, open), because it calls
`strategy.reduce` twice with values that the strategy does not accept. Both calls need the local
value.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer as Trainer
from keras.src.trainers.data_adapters import array_slicing

from lbbsp_tf import env
from lbbsp_tf.compat.state import patch_epochs
from lbbsp_tf.compat.values import Method, Nest, local, patch, patch_broken


def patch_keras() -> None:
    """Makes `fit`, `evaluate` and validation run under MultiWorkerMirroredStrategy."""
    sign = "distribute_strategy.reduce("
    patch_broken(Trainer, "_maybe_symbolic_build", sign, _build_from_local_batch)
    sign = 'strategy.reduce("MEAN", v, axis=0)'
    patch_broken(keras_trainer, "reduce_per_replica", sign, _reduce_locally)
    patch(Trainer, "get_metrics_result", _metrics_without_variables)
    patch(keras.callbacks.ProgbarLogger, "set_params", _lines_without_display)
    patch(array_slicing, "train_validation_split", _split_of_arrays)
    patch_epochs()


def _build_from_local_batch(
    _: object, self: Trainer, iterator: Nest = None, data_batch: Nest = None
) -> None:
    """Builds the model; replaces `_maybe_symbolic_build`, which reduces a tuple of values."""
    if self._distribute_strategy is None:
        return
    if iterator is not None:
        # No batch is drawn: it may not be available a second time. Placeholders hand out their
        # example, and note the fit.
        data = iterator._get_iterator()
        data_batch = data.example() if hasattr(data, "example") else _local_spec(data.element_spec)
    build(self, data_batch)


def _local_spec(spec: Nest) -> Nest:
    """Returns the structure of the first replica's batches."""
    return keras.tree.map_structure(lambda leaf: getattr(leaf, "_value_specs", [leaf])[0], spec)


def is_stock(model: keras.Model, *names: str) -> bool:
    """Returns whether methods of a model are Keras's own, in its class and in the model itself."""
    return all(
        getattr(getattr(model, name), "__func__", None) is getattr(keras.Model, name)
        for name in names
    )


def is_of_keras(code: object) -> bool:
    """Returns whether a function, or an object and what it wraps, are of Keras."""
    wrapped = getattr(code, "_fn", None) or getattr(code, "fn", None)
    definition = code if hasattr(code, "__code__") else type(code)
    return definition.__module__.startswith("keras.") and (wrapped is None or is_of_keras(wrapped))


def require_targets(model: keras.Model, batch: Nest) -> None:
    """Raises an error if Keras would compute the loss of a model without targets."""
    has_loss = getattr(model, "_compile_loss", None) is not None
    has_targets = keras.utils.unpack_x_y_sample_weight(batch)[1] is not None
    if has_loss and not has_targets and is_stock(model, "train_step", "compute_loss"):
        raise ValueError(
            "the model was compiled with a loss, and the data have no targets y: pass them, as in "
            "balancer.dataset(x, y), or let the elements of the data set be (x, y)"
        )


def build(model: keras.Model, batch: Nest) -> None:
    """Builds what is not built yet of a model, its optimizer and its metrics, from a small batch.

    Or leaves it to a custom `train_step`: the step of a VAE, a GAN or a distillation trains layers
    that the model holds, and the model itself cannot be called. What is not built yet is then
    created when the step is traced.
    """
    require_targets(model, batch)
    has_step = not is_stock(model, "train_step")
    with model.distribute_strategy.scope():
        if not has_step or not is_stock(model, "call"):
            try:
                model._symbolic_build(data_batch=batch)
                return
            except Exception:
                if not has_step:  # a fixed size of batches is named later, by the proof
                    any_size = tf.nest.map_structure(
                        lambda rows: tf.TensorSpec([None, *rows.shape[1:]], rows.dtype), batch
                    )
                    model._symbolic_build(data_batch=any_size)
                    return
        layers = model._flatten_layers(include_self=False)
        if model.optimizer is not None and all(layer.built for layer in layers):
            model.optimizer.build(model.trainable_variables)


def _reduce_locally(
    reduce: Method, values: Nest, strategy: tf.distribute.Strategy, reduction: str
) -> Nest:
    """Replaces `reduce_per_replica`, which averages scalars over an axis that they do not have."""
    if reduction == "auto" and keras_trainer._collective_all_reduce_multi_worker(strategy):
        return local(strategy, values)
    return reduce(values, strategy, reduction)


def _lines_without_display(
    set_params: Method, logger: keras.callbacks.ProgbarLogger, params: dict[str, Any]
) -> None:
    """Replaces `set_params` of the progress bar: where none can be shown, it prints as verbose=2.

    Keras draws it into files, too, in which each step then adds a line. Of several workers only the
    first one prints, unless all are to.
    """
    set_params(logger, params)
    strategy = getattr(logger.model, "distribute_strategy", None)
    if strategy and not (strategy.extended.should_save_summary or env.shows_all_progress()):
        logger.verbose = 0
    is_terminal = getattr(sys.stdout, "isatty", lambda: False)  # a logger may lack it
    if logger.verbose == 1 and not (is_terminal() or "ipykernel" in sys.modules):
        logger.verbose = 2


def _split_of_arrays(split: Method, arrays: Nest, validation_split: float) -> Nest:
    """Replaces `train_validation_split`, by which `fit` divides its data."""
    data = tf.data.Dataset, tf.distribute.DistributedDataset
    if any(isinstance(array, data) for array in arrays):
        raise ValueError(
            "fit divides arrays only: call balancer.dataset(..., validation_split="
            f"{validation_split}), and pass validation_data=balancer.validation_data to fit"
        )
    return split(arrays, validation_split)


def _metrics_without_variables(get_metrics_result: Method, model: Trainer) -> Nest:
    """Replaces `get_metrics_result`, in which a metric may return its variable.

    Under a strategy this is a distributed variable, which the progress bar cannot convert.
    """
    return keras.tree.map_structure(
        lambda value: tf.convert_to_tensor(value) if isinstance(value, tf.Variable) else value,
        get_metrics_result(model),
    )
