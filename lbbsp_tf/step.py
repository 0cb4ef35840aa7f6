r"""Aggregate: wraps the user's `train_step` with weights, timing and the exchange.

For mean losses the update of plain BSP is ``g = sum_i (x_i / X) g_i``. Keras computes ``g_i / N``
on each worker and sums these, so the weight is ``N x_i / X``. It multiplies the *loss*, through
`optimizer.scale_loss`, which the stock `train_step` calls after the loss is logged. Synchronised
batch normalisation, whose backward pass mixes the workers' losses, is then exact as well.
Gradients are reduced before the *outermost* optimizer's `apply`, so that clipping and loss
scaling use global gradients, and all workers take the same branches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import keras
import tensorflow as tf

from lbbsp_core.runtime.protocol import WIDTH
from lbbsp_core.runtime.session import WorkerSession
from lbbsp_tf.compat import Nest, replaced

Gradient = tf.Tensor | tf.IndexedSlices | None
Gradients = Sequence[Gradient]
Optimizer = keras.optimizers.Optimizer


class BalancedStep:
    """Wrapped `train_step` for `strategy.run`; it is wrapped each time it is traced.

    Args:
        model: Compiled Keras model.
        next_batch: Draws the step's batch, in the graph; `fit` itself iterates over placeholders.
        session: Session that measures and exchanges around the all-reduce.
        loss_weight: Variable with the value ``N / X_k``, set before the step runs.
    """

    def __init__(
        self,
        model: keras.Model,
        next_batch: Callable[[], Nest],
        session: WorkerSession,
        *,
        loss_weight: tf.Variable,
    ) -> None:
        self._model = model
        self._train_step = model.train_step
        self._next_batch = next_batch
        self._session = session
        self._loss_weight = loss_weight

    def __call__(self, placeholder: Nest) -> dict[str, tf.Tensor]:
        """Trains one step on this worker's batch, and returns the logs of `train_step`."""
        if not tf.executing_eagerly():
            self._session.exclude_step()  # tracing takes longer than a step
        data = self._next_batch()
        weight = self._weight(data)
        self._loss_weighted = self._exchanged = False
        with ExitStack() as stack:
            for optimizer in _optimizers(self._model):
                stack.enter_context(self._around(optimizer, weight))
            stack.enter_context(self._timed_collectives())
            logs = self._train_step(data)
        if not self._exchanged:
            raise ValueError(
                f"{type(self._model).__name__}.train_step applied no gradients: it must call "
                "self.optimizer.apply (or apply_gradients) for LoadBalancer to weight them"
            )
        return logs

    def _weight(self, data: Nest) -> tf.Tensor:
        if sums_over_samples(self._model):
            return tf.constant(1.0)  # the sum of local sums is the global sum
        first = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
        return tf.cast(tf.shape(first)[0], tf.float32) * self._loss_weight

    @contextmanager
    def _around(self, optimizer: Optimizer, weight: tf.Tensor) -> Iterator[None]:
        """Weights the loss, and reduces gradients before `optimizer` applies them."""
        scale_loss, apply = optimizer.scale_loss, optimizer.apply

        def weighted_loss(loss: tf.Tensor) -> tf.Tensor:
            self._loss_weighted = True
            return scale_loss(loss) * tf.cast(weight, loss.dtype)

        def apply_reduced(
            grads: Gradients, trainable_variables: Sequence[keras.Variable] | None = None
        ) -> None:
            if not self._loss_weighted:  # a custom train_step that does not call scale_loss
                grads = [_scaled(g, weight) for g in grads]
            apply(self._reduce(grads), trainable_variables)

        inner = _innermost(optimizer)
        with (
            replaced(optimizer, "scale_loss", weighted_loss),
            replaced(optimizer, "apply", apply_reduced),
            replaced(inner, "_all_reduce_sum_gradients", lambda pairs: pairs),
        ):
            yield

    def _reduce(self, grads: Gradients) -> Gradients:
        """Sums gradients over workers; the first call in a step includes the exchange."""
        present = [g for g in grads if g is not None]
        if not present:
            return grads
        reduced = self._collective(present) if self._exchanged else self._with_exchange(present)
        rest = iter(reduced)
        return [None if g is None else next(rest) for g in grads]

    def _with_exchange(self, grads: Gradients) -> Gradients:
        self._exchanged = True
        row = _call(self._session.before_allreduce, after=grads, returns=tf.float32)
        row.set_shape((WIDTH,))
        slots = tf.one_hot(self._session.rank, self._session.workers)[:, None] * row[None, :]
        # No gradient may be sent before the clock is read, not even a sparse one, which is summed
        # by a separate all-reduce.
        with tf.control_dependencies([row]):
            grads = [_identity(g) for g in grads]
        *grads, rows = _all_reduce([*grads, slots])
        left = _call(self._session.after_allreduce, rows, after=[*grads, rows])
        with tf.control_dependencies([left]):
            return [_identity(g) for g in grads]

    def _collective(self, tensors: Gradients) -> Gradients:
        """Sums tensors over workers; the wait does not count as busy time."""
        paused = _call(self._session.begin_wait, after=tensors)
        with tf.control_dependencies([paused]):
            tensors = _all_reduce([_identity(t) for t in tensors])
        resumed = _call(self._session.end_wait, after=tensors)
        with tf.control_dependencies([resumed]):
            return [_identity(t) for t in tensors]

    @contextmanager
    def _timed_collectives(self) -> Iterator[None]:
        """Excludes waits of collectives inside the step (synchronised layers) from busy time."""
        context = tf.distribute.get_replica_context()
        original = context.all_reduce

        def all_reduce(
            op: tf.distribute.ReduceOp | str, value: Nest, options: object = None
        ) -> Nest:
            flat = keras.tree.flatten(value)
            summed = str(op).upper().endswith("SUM")
            if not summed or any(isinstance(v, tf.IndexedSlices) for v in flat):
                return original(op, value, options)
            return keras.tree.pack_sequence_as(value, timed(*map(tf.convert_to_tensor, flat)))

        @tf.custom_gradient
        def timed(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
            # The gradient of a sum over workers is the sum over workers of the gradients.
            return self._collective(tensors), lambda *dy: self._collective(dy)

        with replaced(context, "all_reduce", all_reduce):
            yield


def sums_over_samples(model: keras.Model) -> bool:
    """Returns whether all losses of the model are sums over samples, not means."""
    losses = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    return bool(losses) and all(getattr(loss, "reduction", None) == "sum" for loss in losses)


def _all_reduce(tensors: Gradients) -> list[Gradient]:
    """Sums tensors over workers, one dtype at a time, because TensorFlow concatenates them."""
    context = tf.distribute.get_replica_context()
    results: list[Gradient] = [None] * len(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        summed = type(context).all_reduce(
            context, tf.distribute.ReduceOp.SUM, [tensors[i] for i in places]
        )
        for place, tensor in zip(places, summed, strict=True):
            results[place] = tensor
    return results


def _call(
    function: Callable[..., object],
    *inputs: tf.Tensor,
    after: Gradients,
    returns: tf.DType | None = None,
) -> tf.Tensor:
    """Calls a Python function from the graph, on the host, after computing the tensors `after`."""
    waits = [t.values if isinstance(t, tf.IndexedSlices) else t for t in after]
    with tf.control_dependencies(waits):
        # On a GPU, a control dependency waits for the launch of a kernel, not for its end. Fetching
        # a value that is computed after it waits for the end.
        probe = tf.reshape(waits[-1], [-1])[:1]
    with tf.device("/CPU:0"):
        if returns is None:
            call = lambda _, *args: (function(*args), 0)[1]  # noqa: E731
            return tf.numpy_function(call, [probe, *inputs], tf.int64)
        return tf.numpy_function(lambda _, *args: function(*args), [probe, *inputs], returns)


def _identity(tensor: Gradient) -> Gradient:
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(tensor.values), tensor.indices, tensor.dense_shape)
    return tf.identity(tensor)


def _scaled(gradient: Gradient, weight: tf.Tensor) -> Gradient:
    if gradient is None:
        return None
    weight = tf.cast(weight, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * weight, gradient.indices, gradient.dense_shape)
    return gradient * weight


def _optimizers(model: keras.Model) -> list[Optimizer]:
    """Returns the compiled optimizer, and others that the model has for a custom `train_step`."""
    candidates = [model.optimizer, *vars(model).values()]
    found = {id(c): c for c in candidates if isinstance(c, keras.optimizers.Optimizer)}
    # An optimizer that another one wraps (loss scaling) must not reduce a second time.
    wrapped = {id(_innermost(c)) for c in found.values() if _innermost(c) is not c}
    return [optimizer for key, optimizer in found.items() if key not in wrapped]


def _innermost(optimizer: Optimizer) -> Optimizer:
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer
