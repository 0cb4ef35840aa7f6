"""Train step of the user: that of a Keras model, or the function of a custom training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from lbbsp_tf.compat import Nest
from lbbsp_tf.compat.fitting import is_of_keras, is_stock

WAYS = ("auto", "samples", "mask", "sum")


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
        is_stock_step = is_stock(model, "train_step")
        if is_stock_step and not model.trainable_variables:
            raise ValueError(
                f"{type(model).__name__} has no trainable weights, so that fit learns nothing: set "
                "trainable = True on a layer, or call evaluate"
            )
        layers = model._flatten_layers(include_self=True, recursive=True)
        return cls(
            model.train_step,
            name,
            f"{type(model).__name__} ({_names_of_losses(model)})" if is_stock_step else name,
            is_stock_step and is_of_keras(model.optimizer),
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
    names = [getattr(loss, "name", "") or getattr(loss, "__name__", str(loss)) for loss in losses]
    return ", ".join(names) or "compute_loss"


@dataclass(frozen=True)
class Weighting:
    """How the gradients of a train step are weighted, so that they sum to that of the whole batch.

    A train step runs as in a single process: it sees one replica (`compat.replicas_view`) and
    this worker's samples. If its loss is a mean over samples, the gradient of the whole batch is
    ``sum_i (x_i / X) g_i``; if it is a sum, ``sum_i g_i``. Which of them holds is not assumed but
    proven on a few samples, see `lbbsp_tf.exactness.proof`.

    Args:
        one_replica: Whether the train step sees a single replica. Otherwise it sees all of them,
            and divides by their number what is not a sum over samples, such as regularisers.
        sums: Whether the loss is a sum over samples, for each `apply` and `sum_gradients` of the
            step in order; the last one stands for further ones.
        summed: Whether each of these calls takes sums that `sum_gradients` has returned; the last
            one stands for further ones.
        by_tokens: Whether losses that are means over valid tokens are weighted by these.
        logged: What the scalars that a step passes to `Mean` metrics are, in order. The value of
            all samples is the sum of those of workers, times this factor, or their mean if it is
            None, as for further scalars.
        targets: Whether the targets of the gradients that a step takes are sums over samples, in
            order; None for what is neither a sum nor a mean, as for further targets.
    """

    one_replica: bool = True
    sums: tuple[bool, ...] = (False,)
    by_tokens: bool = False
    summed: tuple[bool, ...] = ()
    logged: tuple[float | None, ...] = field(default=(), compare=False)
    targets: tuple[bool | None, ...] = field(default=(), compare=False)

    def is_sum(self, call: int) -> bool:
        """Returns whether the loss of the `call`-th `apply` of a step is a sum over samples."""
        return self.sums[min(call, len(self.sums) - 1)]

    def is_summed(self, call: int) -> bool:
        """Returns whether the `call`-th `apply`, after a `sum_gradients`, takes its sums."""
        return bool(self.summed) and self.summed[min(call, len(self.summed) - 1)]

    def is_sum_of_target(self, number: int, *, of_variables: bool) -> bool | None:
        """Returns whether the target of a gradient is a sum over samples, or None if unknown."""
        of_target = self.targets[number] if number < len(self.targets) else None
        of_losses = self.sums[0] if of_variables and len(set(self.sums)) == 1 else None
        return of_losses if of_target is None else of_target

    def factor_of_logged(self, number: int) -> float | None:
        """Returns the factor of the sum of a logged scalar over workers, or None for a mean."""
        return self.logged[number] if number < len(self.logged) else None

    @classmethod
    def chosen(cls, weight_by: str) -> Weighting | None:
        """Returns the weighting that a user has asked for, or None if it has to be proven."""
        return {
            "samples": cls(summed=(True,)),
            "sum": cls(one_replica=False, sums=(True,), summed=(True,)),
        }.get(weight_by)
