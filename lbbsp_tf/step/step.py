r"""Aggregate: wraps the user's `train_step` with weights, timing and the exchange.

The train step runs as in a single process, on this worker's samples. For a mean loss the update of
plain BSP is ``g = sum_i (x_i / X) g_i``, so that gradients are weighted by ``x_i / X`` and summed
before the *outermost* optimizer's `apply`: clipping and loss scaling then use global gradients,
and all workers take the same branches. Synchronised batch normalisation, whose backward pass mixes
the workers' losses, is weighted inside its own collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import keras
import tensorflow as tf

from lbbsp_core.runtime.exchange.buckets import in_buckets
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_tf import compat
from lbbsp_tf.compat import Apply, Gradient, Gradients, Method, Nest, TensorLike, replaced
from lbbsp_tf.compat.metrics import whole_batches
from lbbsp_tf.compat.random import Noise, noise_of
from lbbsp_tf.rows import count_rows, first_leaf
from lbbsp_tf.step.buckets import bytes_of
from lbbsp_tf.step.train_step import TrainStep, Weighting

logger = logging.getLogger("lbbsp.tf")

_NO_GRADIENT = (
    "a gradient through synchronised batch normalisation is taken of what is neither a mean nor a "
    "sum over samples, or in another way than by GradientTape.gradient in the train step itself: "
    "take that of a mean, a sum or a vector with an element for each sample (without jacobian, "
    "tf.gradients, tf.function or loop), or use LayerNormalization"
)


class PartsOfStep(Protocol):
    """Parts that this process claims of a running step, see `lbbsp_tf.step.parts`."""

    def added(self, step: BalancedStep, grads: Gradients) -> Gradients:
        """Returns weighted gradients with those of all parts that are claimed, in a graph."""
        ...


@dataclass(eq=False)
class BalancedStep:
    """Wrapped `train_step` for `strategy.run`; it is wrapped each time it is traced."""

    train_step: TrainStep
    sessions: Sequence[WorkerSession]  # of this process's replicas
    next_batches: Sequence[Callable[[], Nest]]  # draw the batches of the replicas in the graph
    weighting: Weighting
    share_of_sample: tf.Variable  # 1 / X_k, set before the step runs
    share_seed: Callable[[], None]  # see `compat.shared_global_seed`
    bucket_bytes: int = 0  # see `in_buckets`
    parts: PartsOfStep | None = None  # of the only replica of the process
    traces: int = 0
    has_warned: bool = False  # of batch normalisation

    def __call__(self, placeholder: Nest = None) -> Nest:
        """Trains a step on this replica's batch, and returns the results of the train step."""
        number = self._replica()
        if not tf.executing_eagerly():
            self.sessions[number].exclude_step(retraced=True)  # takes longer than a step
            self.traces += 1
        self.share_seed()
        data = self.next_batches[number]()
        share = tf.cast(count_rows(first_leaf(data)), tf.float64) * self.share_of_sample
        step = ReplicaStep(self.sessions[number], self.weighting, share, None, self.bucket_bytes)
        if self.parts is not None:
            step.add_parts = partial(self.parts.added, self)
        with compat.plain_batch_norm_noticed(self._warn_of_batch_norm):
            results = step.run(self.train_step.function, data)
        if not step.applied:
            raise ValueError(
                f"{self.train_step.name} applied no gradients: it must call optimizer.apply (or "
                "apply_gradients) for LoadBalancer to weight them"
            )
        return results

    def _warn_of_batch_norm(self) -> None:
        if not self.has_warned:
            self.has_warned = True
            logger.warning(
                "BatchNormalization normalises each worker's batch separately, so that the result "
                "depends on how the batch is split: call lbbsp_tf.synchronize_batch_norm(model), "
                "or use BatchNormalization(synchronized=True)"
            )

    def weighted(self, data: Nest, share: tf.Tensor, keep: Callable[[Gradients], None]) -> None:
        """Runs the train step on `data` without an exchange.

        Its weighted sums of gradients are passed to `keep` instead of the optimizers.
        """
        step = ReplicaStep(self.sessions[self._replica()], self.weighting, share, keep)
        step.run(self.train_step.function, data)

    def _replica(self) -> int:
        """Returns the number of the replica of this process that is being traced."""
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        return int(tf.get_static_value(number)) - self.sessions[0].rank


@dataclass(eq=False)
class ReplicaStep:
    """One run, or trace, of a train step in a replica."""

    _session: WorkerSession  # measures and exchanges around the all-reduce
    _weighting: Weighting
    _share: tf.Tensor  # of the replica's batch in the samples of all replicas, a scalar of float64
    _keep: Callable[[Gradients], None] | None = None  # takes the sums, in a step without exchange
    _bucket_bytes: int = 0  # see `in_buckets`
    replicas: ClassVar[int] = 0  # that a step sees that divides by them; 0: all of them
    add_parts: Callable[[Gradients], Gradients] | None = None  # see `Parts.added`
    applied: int = 0  # calls of `apply` and `sum_gradients`
    _logged: int = 0  # scalars
    _targets: int = 0  # of gradients
    _has_sums: bool = False
    _has_exchanged: bool = False
    _has_sums_of_layers: bool = False
    _of_sum: bool | None = None  # whether a gradient of a sum is being taken

    def run(self, train_step: Callable[[Nest], Nest], data: Nest) -> Nest:
        """Runs the user's train step as in a single process, and weights and sums its gradients."""
        weighting, share = self._weighting, self._share
        with ExitStack() as stack:
            stack.enter_context(compat.fresh_traces())
            if weighting.one_replica:
                stack.enter_context(compat.replicas_view())
                stack.enter_context(compat.added_vectors_scaled(1.0 / share, data))
            elif self.replicas:
                stack.enter_context(compat.replicas_view(self.replicas))
            if weighting.by_tokens:
                stack.enter_context(compat.token_means_scaled(self._token_factor))
            stack.enter_context(compat.intercepted_scalars(self._scalar))
            stack.enter_context(compat.intercepted_gradients(self._gradient))
            if self._keep is None:
                stack.enter_context(noise_of(Noise(self._session.rank)))
            stack.enter_context(compat.intercepted_apply(self._apply))
            stack.enter_context(self._timed_collectives())
            stack.enter_context(whole_batches((share, self._collective)))
            return train_step(data)

    def _apply(self, grads: Gradients, apply: Apply) -> Gradients:
        """Weights and sums gradients before an optimizer applies them, or for `sum_gradients`."""
        if not (apply and self._has_sums and self._weighting.is_summed(self.applied)):
            if not self._weighting.is_sum(self.applied):
                grads = [_scaled(g, self._share) for g in grads]
            grads = self._reduce(grads)
        self.applied += 1
        self._has_sums |= apply is None
        if take := self._keep or apply:
            take(grads)
        return grads if apply else [_underivable(g) for g in grads]

    def _scalar(self, value: tf.Tensor, weight: tf.Tensor | None) -> tuple[tf.Tensor, Nest]:
        """Weights a scalar that a metric averages, so that all workers count as one process.

        The weights of a step sum to that of one process over workers: 1, if it has none.
        """
        factor = self._weighting.factor_of_logged(self._logged)
        self._logged += 1
        if factor is not None:
            if self.replicas and not self._weighting.one_replica and factor != 1:
                factor *= self._session.workers / self.replicas  # the value is multiplied by it
            value = tf.cast(value, tf.float64) * factor / self._share
        return value, self._share if weight is None else weight

    def _gradient(self, _: object, of_variables: bool, take: Callable[[], Nest]) -> Nest:
        """Takes a gradient, also through synchronised layers, see `_sum_of_losses`."""
        is_sum = self._weighting.is_sum_of_target(self._targets, of_variables=of_variables)
        self._targets += 1
        is_sum = self._of_sum if is_sum is None else is_sum  # a layer may recompute a part
        with replaced(self, "_of_sum", is_sum):
            try:
                return take()
            except LookupError as error:  # through a collective in a loop
                raise ValueError(_NO_GRADIENT) from error

    def _token_factor(self, tokens: tf.Tensor, why: str) -> tf.Tensor:
        """Returns this replica's share of the tokens of all, relative to that of the samples."""
        tokens = tf.cast(tokens, tf.float64)
        (total,) = self._collective([tokens])
        return tf.stop_gradient(tf.math.divide_no_nan(tokens, total) / self._share)

    def _reduce(self, grads: Gradients) -> Gradients:
        """Sums gradients over workers; the first call in a step includes the exchange."""
        present: Gradients = [g for g in grads if g is not None]
        if not present:
            return grads
        exchanges = not (self._has_exchanged or self._keep)
        if exchanges and self.add_parts:
            present = self.add_parts(present)
        reduced = iter((self._with_exchange if exchanges else self._collective)(present))
        return [None if g is None else next(reduced) for g in grads]

    def _with_exchange(self, grads: Gradients) -> Gradients:
        self._has_exchanged = True
        session, overlap = self._session, self._session.meter.overlap
        # Executed eagerly, the backward pass is over, and sums would count as busy time. TensorFlow
        # sends in the order of the trace: nothing before the sums of synchronised layers.
        is_late = tf.executing_eagerly() or self._has_sums_of_layers
        *buckets, last = in_buckets([*map(bytes_of, grads)], 0 if is_late else self._bucket_bytes)
        sums: dict[int, Gradient] = {}
        arrived: list[tf.Tensor] = []
        for bucket in buckets:
            computed = [grads[place] for place in bucket]
            begun = call_after(overlap.begin, after=[*arrived[-1:], *computed])  # sent one by one
            bucket_sums = _all_reduce(computed)
            arrived.append(call_after(overlap.end, after=[*bucket_sums, begun]))
            sums.update(zip(bucket, bucket_sums, strict=True))
        row = call_after(session.before_allreduce, after=grads, returns=tf.float32)
        row.set_shape((session.width,))
        # Zeros with this worker's message in its row, shape (workers, width).
        slots = tf.one_hot(session.rank, session.workers)[:, None] * row[None, :]
        # The last bucket is not sent before the clock is read, not even a sparse gradient in it,
        # which is summed by a separate all-reduce.
        *bucket_sums, rows = _all_reduce([*_after(row, [grads[place] for place in last]), slots])
        sums.update(zip(last, bucket_sums, strict=True))
        grads = [sums[place] for place in range(len(grads))]
        # Planned while the optimizer applies them; a step ends when both are done.
        call_after(session.after_allreduce, rows, after=[*grads, *arrived, rows])
        return grads

    def _collective(self, tensors: Gradients, run: Method | None = None) -> Gradients:
        """Sums tensors over workers, or runs another collective; the wait is not busy time."""
        paused = call_after(self._session.meter.begin_wait, after=tensors)
        tensors = (run or _all_reduce)(_after(paused, tensors))
        return _after(call_after(self._session.meter.end_wait, after=tensors), tensors)

    def _timed_collectives(self) -> AbstractContextManager[None]:
        """Excludes waits of collectives inside the step (synchronised layers) from busy time."""
        context = tf.distribute.get_replica_context()
        original = context.all_reduce

        def all_reduce(op: tf.distribute.ReduceOp | str, value: Nest, options: Nest = None) -> Nest:
            flat = keras.tree.flatten(value)
            summed = str(op).upper().endswith("SUM")
            if not summed or any(isinstance(v, tf.IndexedSlices) for v in flat):
                return original(op, value, options)
            return keras.tree.pack_sequence_as(value, timed(*map(tf.convert_to_tensor, flat)))

        def forward(*tensors: tf.Tensor) -> tuple[Gradients, Callable[..., Gradients]]:
            self._has_sums_of_layers = True
            return self._collective(tensors), lambda *dy: self._sum_of_losses(timed, dy)

        timed = tf.custom_gradient(forward)
        return replaced(context, "all_reduce", all_reduce)

    def _sum_of_losses(self, summed: Callable[..., Gradients], gradients: Gradients) -> Gradients:
        """Sums the gradients of all workers' targets with respect to a sum over workers.

        Each mean counts with its worker's share. This worker's share is divided out again, because
        its gradients are weighted after the backward pass. `summed` can be derived again.
        """
        if self._of_sum is None:
            raise ValueError(_NO_GRADIENT)
        if self._of_sum:
            return summed(*gradients)
        sums = summed(*[_scaled(g, self._share) for g in gradients])
        return [_scaled(g, 1.0 / self._share) for g in sums]


def _all_reduce(tensors: Sequence[TensorLike]) -> list[TensorLike]:
    """Sums tensors over workers, one dtype at a time, because TensorFlow concatenates them."""
    context = tf.distribute.get_replica_context()
    summed: dict[int, TensorLike] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        alike = {i: t for i, t in enumerate(tensors) if t.dtype == dtype}
        sums = type(context).all_reduce(context, tf.distribute.ReduceOp.SUM, [*alike.values()])
        summed.update(zip(alike, sums, strict=True))
    return [summed[i] for i in range(len(tensors))]


def call_after(
    function: Method, *inputs: tf.Tensor, after: Gradients, returns: tf.DType | None = None
) -> tf.Tensor:
    """Calls a Python function from the graph, on the host, after computing the tensors `after`."""
    waits = [t.values if isinstance(t, tf.IndexedSlices) else t for t in after]
    with tf.control_dependencies(waits):
        # On a GPU, a control dependency waits for the launch of a kernel, not for its end. Fetching
        # a value that is computed after it waits for the end.
        probe = tf.reshape(waits[-1], [-1])[:1]
    with tf.device("/CPU:0"):
        result = tf.numpy_function(
            lambda _, *args: function(*args) if returns else (function(*args), 0)[1],
            [probe, *inputs],
            returns or tf.int64,
        )
    if not tf.executing_eagerly():
        # TensorFlow runs such calls of all replicas in the order of their traces, so that one
        # replica would wait for another one.
        manager = result.graph.experimental_acd_manager
        if manager is not None:
            manager.run_independently(result.op)
    return result


def _underivable(gradient: Gradient) -> Gradient:
    """Returns a sum of gradients; its own gradient would be that of this worker alone."""
    message = (
        "a loss depends on what sum_gradients has returned, and its gradient would be that of one "
        "worker: call sum_gradients outside of the tape of this loss"
    )
    return _on_values(lambda v: tf.raw_ops.PreventGradient(input=v, message=message), gradient)


def _after(done: tf.Tensor, tensors: Gradients) -> list[Gradient]:
    """Returns tensors that are available only once `done` is computed."""
    with tf.control_dependencies([done]):
        return [_on_values(tf.identity, tensor) for tensor in tensors]


def _scaled(gradient: Gradient, weight: tf.Tensor) -> Gradient:
    return _on_values(lambda values: values * tf.cast(weight, values.dtype), gradient)


def _on_values(change: Callable[[tf.Tensor], tf.Tensor], gradient: Gradient) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else change(gradient)
