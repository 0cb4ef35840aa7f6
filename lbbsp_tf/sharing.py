"""Work sharing in the trainings of one balancer: whether a train step allows it.

It is tried before the first step. Steps with and without parts are then traced at once, so that
both have the same values of Python.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext

import tensorflow as tf
from tensorflow.python.framework.errors_impl import InaccessibleTensorError

from lbbsp_core.reserve import AUTO, mode_of
from lbbsp_core.runtime.extensions.work_sharing import WorkSharing
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_tf.cluster import addresses
from lbbsp_tf.compat import Gradients, Nest
from lbbsp_tf.data.dataset import Pipeline
from lbbsp_tf.exactness.probe import Probe, sketch_of
from lbbsp_tf.exchange.claims import counters
from lbbsp_tf.step.parts import Parts, PartStep
from lbbsp_tf.step.step import BalancedStep, PartsOfStep
from lbbsp_tf.step.train_step import Weighting

logger = logging.getLogger("lbbsp.tf")

_SEED = "seed_generator_state"  # in the name of a state of noise; that of parts leaves it


class Sharing:
    """Work sharing in the trainings of one balancer.

    Args:
        share_work: See `LoadBalancer`.
        strategy: Strategy of the user.
        sessions: Sessions of this process's replicas.
    """

    def __init__(
        self,
        share_work: bool | str | float,
        strategy: tf.distribute.Strategy,
        sessions: Sequence[WorkerSession],
    ) -> None:
        self._is_required = share_work not in (False, AUTO)
        self._extensions = [session.extensions[WorkSharing] for session in sessions]
        for extension in self._extensions:
            extension.mode = mode_of(share_work)
        self._strategy, self._session = strategy, sessions[0]
        self._parts: Parts | None = None

    @property
    def step_variants(self) -> Sequence[PartsOfStep | None]:
        """Parts with which steps of this training may run; None: without."""
        return (None, self._parts) if self._extensions[0].allowed else (None,)

    def begin_step(self, step: BalancedStep, pipeline: Pipeline) -> Parts | None:
        """Returns the parts of the running step, if it has a reserve; call it before the step.

        Raises:
            ValueError: The training must share work, and cannot; in its first step.
        """
        extension = self._extensions[0]
        if not extension.mode:
            return None
        if extension.allowed is None:
            self._session.exclude_step()
            self._allow(step, pipeline)
        claims = extension.begin()
        if claims is None or self._parts is None:
            return None
        self._parts.begin_step(claims)
        return self._parts

    def _allow(self, step: BalancedStep, pipeline: Pipeline) -> None:
        """Notes whether the training may share work; a collective."""
        session, clock = self._session, time.time_ns()
        why = self._obstacle(step, pipeline)
        if why is None:
            counter = counters(addresses(self._strategy.cluster_resolver)[0])
            if self._parts is None or not self._parts.are_of(step, pipeline):
                self._parts = Parts(session, counter, step, pipeline)
            if not counter.is_usable(f"lbbsp/trial/{session.rank}/{clock}"):
                why = "TensorFlow's coordination service does not count: that of 2.21 does"
        rows = session.collectives.all_gather([int(why is None), clock % (1 << 40)])
        able = [flag for flag, _ in rows]
        for extension in self._extensions:
            extension.allowed = all(able)
        if all(able) and self._parts is not None:
            self._parts.name = str(rows[0][1])
            return
        why = why or f"worker {able.index(0)} cannot, and says why"
        if self._is_required:
            raise ValueError(f"steps cannot share work, because {why}: leave share_work out")
        if session.rank == able.index(0):
            logger.warning("steps do not share work, because %s", why)

    def _obstacle(self, step: BalancedStep, pipeline: Pipeline) -> str | None:
        """Returns why parts of a step cannot be computed apart; None if they can."""
        train_step, source = step.train_step, pipeline.source
        if len(step.sessions) > 1 or self._session.collectives.workers == 1:
            return "each process has several devices: start a worker for each device"
        if train_step.in_loop:
            return "a custom loop takes the results of its train step: fit can"
        if tf.config.functions_run_eagerly():
            return "functions run eagerly"
        if source.records is not None or source.is_sequential or source.by_batch:
            return "the data set can only be read in its own order: pass arrays"
        if pipeline.order.work is not None:
            return "plans divide work=, not samples"
        if step.weighting == Weighting.chosen("sum"):
            return 'weight_by="sum" does not tell what is logged: leave it out'
        return self._obstacle_in_step(step, pipeline)

    def _obstacle_in_step(self, step: BalancedStep, pipeline: Pipeline) -> str | None:
        """Runs the train step, and inside its `apply` a part of it, without any effect."""
        name, function = step.train_step.name, step.train_step.function
        samples, share = pipeline.order.indices(0)[:2], tf.constant(1.0, tf.float64)
        part = PartStep(self._session, step.weighting, share)
        computed: list[tf.Tensor] = []

        def replica() -> Nest:
            batch = pipeline.batch_of(tf.constant(samples))

            def compute(total: tf.Tensor) -> tf.Tensor:
                sketch = sketch_of(part.gradients(function, batch, tf.constant(samples[0])))
                return total + tf.reduce_sum(tf.cast(sketch, total.dtype))

            def in_loop(_: Gradients) -> None:  # as `Parts.added` computes parts
                if not computed:
                    always = lambda _: True  # noqa: E731
                    total = [tf.zeros([])]
                    computed.extend(tf.while_loop(always, compute, total, maximum_iterations=1))

            step.weighted(batch, share, in_loop)
            return computed

        try:
            _, written = Probe(self._strategy, replica, nullcontext).run()
        except Exception as error:
            if part.has_met:
                return (
                    f"{name} needs all workers before it applies gradients, as synchronised batch "
                    "normalisation, means over tokens and metrics written by hand do"
                )
            if isinstance(error, InaccessibleTensorError):
                return f"{name} reads a tensor after apply that no attribute of a layer keeps"
            return f"{name} fails on a part of a batch: {error}"
        if part.applied > 1:
            return f"{name} applies gradients {part.applied} times"
        names = [write.name for write in written if not (write.is_local or _SEED in write.name)]
        if names:
            return f"{name} assigns {', '.join(names)} besides the optimizer's apply"
        return None
