"""Train step of the user: that of a Keras model, or the function of a custom training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import tensorflow as tf

from lbbsp_tf.compat import Nest


@dataclass(frozen=True)
class TrainStep:
    """Function that trains on one batch, and what is known of it.

    Args:
        function: Called with a batch; applies gradients by Keras optimizers.
        name: What it is called in errors.
        loss_name: What its loss is called in errors.
        keeps_gradients: Whether it is Keras's own, and passes gradients on as they are to an
            optimizer of Keras.
        is_inexact: Whether rounding is coarse.
        in_loop: Whether the user's loop takes its results.
    """

    function: Callable[[Nest], Nest]
    name: str
    loss_name: str
    keeps_gradients: bool
    is_inexact: bool
    in_loop: bool = False

    @classmethod
    def of_model(cls, model: keras.Model) -> TrainStep:
        """Returns the train step of a compiled model."""
        name = f"{type(model).__name__}.train_step"
        _check_is_plain(model.train_step, name)
        is_stock = type(model).train_step is keras.Model.train_step
        if is_stock and not model.trainable_variables:
            raise ValueError(
                f"{type(model).__name__} has no trainable weights, so that fit learns nothing: set "
                "trainable = True on a layer, or call evaluate"
            )
        layers = model._flatten_layers(include_self=True, recursive=True)
        return cls(
            model.train_step,
            name,
            f"{type(model).__name__} ({_names_of_losses(model)})" if is_stock else name,
            is_stock and type(model.optimizer).__module__.startswith("keras."),
            is_inexact(*(layer.compute_dtype for layer in layers)),
        )

    @classmethod
    def of_function(cls, function: Callable[[Nest], Nest]) -> TrainStep:
        """Returns the train step of a custom loop."""
        name = getattr(function, "__qualname__", repr(function))
        _check_is_plain(function, name)
        inexact = is_inexact(keras.config.dtype_policy().compute_dtype)
        return cls(function, name, name, False, inexact, in_loop=True)


def is_inexact(*dtypes: str) -> bool:
    """Returns whether rounding is coarse: in half precision, and by the short products of GPUs."""
    is_half = any(dtype in ("float16", "bfloat16") for dtype in dtypes)
    return is_half or bool(tf.config.list_logical_devices("GPU"))


def _check_is_plain(function: Callable[[Nest], Nest], name: str) -> None:
    if isinstance(function, tf.types.experimental.PolymorphicFunction):
        raise ValueError(
            f"{name} must not be a tf.function, because the balanced step is compiled as a whole: "
            "remove the decorator @tf.function"
        )


def _names_of_losses(model: keras.Model) -> str:
    losses = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    names = [getattr(loss, "name", None) or getattr(loss, "__name__", str(loss)) for loss in losses]
    return ", ".join(names) or "compute_loss"
