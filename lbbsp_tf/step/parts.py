"""Work sharing inside a step: the parts that a worker claims, computed in the graph of its step.

The optimizer's `apply` of the main part runs the user's train step again on each part, in a loop of
the same graph, where what it would apply is added to the gradients of the main part. These are then
summed over workers, once. Metrics and logged losses are updated by all parts before the train step
of the main part reads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from lbbsp_core.order import Indices
from lbbsp_core.runtime.extensions.work_sharing import StepClaims
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_tf.compat import Gradients, Nest, TensorLike, attributes_kept, replaced, without_outputs
from lbbsp_tf.compat.random import Noise, noise_of
from lbbsp_tf.data.dataset import Pipeline
from lbbsp_tf.exchange.claims import Counters
from lbbsp_tf.step.step import BalancedStep, ReplicaStep, call_after

_NO_SAMPLES = np.empty(0, np.int64)


class Parts:
    """Parts that this worker claims of the running step.

    Args:
        session: Session of this worker.
        counters: Counters of the job.
        step: Step that computes them.
        pipeline: Reads them.

    Attributes:
        name: Part of the keys of counters that is new in each training.
    """

    name = ""

    def __init__(
        self, session: WorkerSession, counters: Counters, step: BalancedStep, pipeline: Pipeline
    ) -> None:
        self._session, self._counters = session, counters
        # TensorFlow keeps what the graph calls, and so these parts, until the process ends.
        self._step, self._pipeline = weakref.ref(step), weakref.ref(pipeline)
        self._claims: StepClaims | None = None
        self._key = ""  # of the counter of the running step
        self._reserve: Indices = _NO_SAMPLES

    def are_of(self, step: BalancedStep, pipeline: Pipeline) -> bool:
        """Returns whether these are the parts of a step that reads from a pipeline."""
        return self._step() is step and self._pipeline() is pipeline

    def begin_step(self, claims: StepClaims) -> None:
        """Prepares the claims of the running step; call it before the step."""
        session = self._session
        self._claims = claims
        self._reserve = session.balancer.schedule.reserve_indices(session.step)
        if session.rank == 0 and self._key:
            self._counters.forget(self._key)
        self._key = f"lbbsp/reserve/{self.name}/{session.step}"

    def claim(self) -> Indices:
        """Returns the samples of the next part; none if nothing is left."""
        if self._claims is None:
            return _NO_SAMPLES
        begin, end = self._claims.take(lambda size: self._counters.add(self._key, size))
        if begin == end:
            self._claims = None
        return self._reserve[begin:end]

    def added(self, step: BalancedStep, grads: Gradients) -> Gradients:
        """Returns weighted gradients with those of all parts that are claimed, in a graph."""
        if (pipeline := self._pipeline()) is None:
            raise RuntimeError("a step is traced after its data set was deleted")

        def compute(samples: tf.Tensor) -> Gradients:
            batch = pipeline.batch_of(samples)
            share = tf.cast(tf.size(samples), tf.float64) * step.share_of_sample
            part = PartStep(self._session, step.weighting, share)
            return part.gradients(step.train_step.function, batch, samples[0])

        def claimed(after: Gradients) -> tf.Tensor:
            samples = call_after(self.claim, after=after, returns=tf.int64)
            samples.set_shape([None])
            return samples

        def body(samples: tf.Tensor, sums: Gradients) -> tuple[tf.Tensor, Gradients]:
            sums = [*map(_plus, sums, compute(samples))]
            return claimed(sums), sums

        _, sums = tf.while_loop(
            lambda samples, _: tf.size(samples) > 0,
            body,
            [claimed(grads), grads],
            shape_invariants=[tf.TensorShape([None]), [*map(_shape, grads)]],
            parallel_iterations=1,
        )
        return list(sums)


class PartStep(ReplicaStep):
    """Run of the train step on a part, whose gradients are added to those of others.

    What no sample has, such as a regulariser, counts once in a step. Of a mean it counts by the
    part's share, as all else; of a sum the main parts count it, and here it is divided by many.
    """

    replicas = 1 << 30
    has_met: bool = False  # whether it would have run a collective

    def gradients(
        self, train_step: Callable[[Nest], Nest], data: Nest, number: tf.Tensor
    ) -> Gradients:
        """Returns the weighted gradients that the train step would apply to a part."""
        all_gradients: list[Gradients] = []
        self._keep = all_gradients.append
        noise = noise_of(Noise(self._session.rank, number))
        with noise, attributes_kept(train_step), without_outputs():
            self.run(train_step, data)
        return [gradient for grads in all_gradients for gradient in grads if gradient is not None]

    def _reduce(self, grads: Gradients) -> Gradients:
        return grads

    def _collective(self, *_: object, **__: object) -> Gradients:
        self.has_met = True
        raise NotImplementedError("workers compute different numbers of parts")

    @contextmanager
    def _timed_collectives(self) -> Iterator[None]:
        context = tf.distribute.get_replica_context()
        with (
            replaced(context, "all_reduce", self._collective),
            replaced(context, "all_gather", self._collective),
        ):
            yield


def _plus(total: TensorLike, gradient: TensorLike) -> TensorLike:
    if isinstance(total, tf.IndexedSlices):
        values = tf.concat([total.values, gradient.values], 0)
        indices = tf.concat([total.indices, gradient.indices], 0)
        return tf.IndexedSlices(values, indices, total.dense_shape)
    return total + tf.convert_to_tensor(gradient)


def _shape(gradient: TensorLike) -> Nest:
    """Returns the shape that sums of gradients keep: sparse ones grow by the rows of each part."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient.shape
    return tf.TensorShape([None, *gradient.values.shape[1:]])
