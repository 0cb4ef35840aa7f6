"""Input of the fits of one `LoadBalancer`: its data sets, and what is checked while they train."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.exchange.digest import check_samples
from lbbsp_core.runtime.exchange.protocol import DisagreementError
from lbbsp_tf.data.dataset import Pipeline, PlaceholderDataset
from lbbsp_tf.data.options import InputOptions
from lbbsp_tf.data.source import Source
from lbbsp_tf.data.stream import BatchIterator
from lbbsp_tf.exchange.collectives import ReplicaSessions

logger = logging.getLogger("lbbsp.tf")

MAX_WAIT = 0.2
"""Share of the busy time that steps may wait for input before a warning is logged."""

MIN_WAIT_SECONDS = 0.005
"""Wait per step below which no warning is logged."""


class TrainingInput:
    """Input of one balancer: from `dataset` to the end of the fit that trains on it.

    A callback may create further data sets during a fit, which goes on with its own: `latest` is
    the one that was created last, and `pipeline` that of the fit.
    """

    def __init__(self, sessions: ReplicaSessions, strategy: tf.distribute.Strategy) -> None:
        self._sessions = sessions
        self._session = sessions.leader
        self._strategy = strategy
        self.announced: Pipeline | None = None  # the one that Keras has built the model for
        self._running: Pipeline | None = None  # that of the fit
        self.latest: Pipeline | None = None
        self._drawn: Sequence[Pipeline] = []
        self.iterators: list[BatchIterator] = []  # the same for data sets of one structure
        self._may_iterate = False
        self._first = self._end = 0  # step of the fit; step after the epoch that is being drawn
        self._wait = InputWait()

    @property
    def pipeline(self) -> Pipeline:
        """Pipeline of the fit, from its beginning to its end."""
        if self._running is None:
            raise RuntimeError("no fit or loop is running")
        return self._running

    @property
    def order(self) -> GlobalOrder | None:
        """Order of the data set that a fit was given last, or else of the latest one."""
        pipeline = self.announced or self.latest
        return pipeline.order if pipeline else None

    def dataset(self, options: InputOptions) -> tf.data.Dataset | PlaceholderDataset:
        """Creates the training data of a fit; see `LoadBalancer.dataset`."""
        self.announced = None  # by a fit that has failed
        source = options.open(self._session.balancer.constraints.global_batch_size)
        if options.prefetch is None:
            ahead = not source.in_memory or options.map is not None
            options = replace(options, prefetch=int(ahead))
        order = self._session.make_order(
            source.num_samples,
            options.seed,
            shuffle=options.shuffle is not False and not source.is_sequential,
            steps_per_epoch=options.steps_per_epoch,
            by_batch=source.by_batch,
            work=_of_training(options.work, source),
        )
        if source.by_batch and order == self._session.order:
            step = self._session.step_of_order(self._session.step)
            source.continue_at(step // order.steps_per_pass)
        batch_maps = (options.batch_map,) if options.batch_map else ()
        self.latest = pipeline = Pipeline(self._session, order, source, options, batch_maps)
        if self._session.workers == 1:
            self._session.use_order(order)
            return pipeline.epoch()
        return PlaceholderDataset(pipeline, self._strategy, self.announce, self.check_iteration)

    # A fit, in the order of its events

    def announce(self, pipeline: Pipeline) -> None:
        """Notes which data set Keras builds the model for, before the fit starts."""
        self.announced = pipeline
        self._may_iterate = False

    def begin_fit(self) -> None:
        """Prepares the session for the announced data set; call it when the training begins."""
        self._running, self.announced = self.announced, None
        self.latest = pipeline = self.pipeline
        for session in self._sessions:
            session.use_order(pipeline.order)
            session.use_lag(1 + (pipeline.options.prefetch or 0))
        self._may_iterate = True
        self._wait = InputWait()

    def begin_alone(self) -> None:
        """Begins the fit of a single worker, which draws from the latest data set, if any."""
        self._running = self.latest

    def compare_samples(self) -> None:
        """Compares some samples with those of the other workers; a collective.

        Samples of a stream are compared as they are read. Samples that change when they are read
        again (random augmentation), on any worker, are skipped.
        """
        source = self.pipeline.source
        if source.records is not None:
            return
        try:
            check_samples(self._session.collectives, source.digests)
        except DisagreementError:  # which all workers find
            # Texts, because NaN is not equal to itself.
            changes = repr(source.read_digests()) != repr(source.digests)
            if not self._session.any_worker(changes):
                raise

    def check_iteration(self, pipeline: Pipeline) -> None:
        """Allows one iteration of the announced data set, that of a fit that has begun."""
        if self._may_iterate and pipeline is self._running:
            self._may_iterate = False
            return
        if self._running is not None:
            raise ValueError(
                "validation_data must be arrays or a tf.data.Dataset: only the training step can "
                "draw from balancer.dataset(...)"
            )
        raise ValueError(
            "balancer.dataset(...) can only be trained on by fit(..., callbacks=[balancer]): pass "
            "the balancer as a callback; evaluate and predict take arrays or a tf.data.Dataset"
        )

    def begin_epochs(self) -> None:
        """Draws from the session's running step on; call it when the first epoch begins."""
        pipeline = self.pipeline
        spec = pipeline.batches.element_spec
        if not self.iterators or self.iterators[0].element_spec != spec:
            self.iterators = [BatchIterator(spec) for _ in self._sessions]
        if pipeline.source.records is not None:
            pipeline.source.records.forget_from(self._session.step)
        # Iterators do not keep their pipelines alive.
        self._drawn = pipeline.of_replicas(self._sessions)
        self._first = self._end = self._session.step

    def begin_step(self) -> None:
        """Draws a further epoch if one begins, of the announced data set, or raises ValueError."""
        if self._may_iterate:
            raise ValueError(
                "fit needs the data of the balancer: call fit(balancer.dataset(x, y), ...)"
            )
        if self._session.step == self._end:
            self._end += self.pipeline.order.steps_per_epoch
            for iterator, pipeline in zip(self.iterators, self._drawn, strict=True):
                iterator.start(pipeline.batches)

    def end_step(self) -> None:
        """Adds up the time that the step has waited; compares the first records of a fit."""
        self._wait.add(float(self.iterators[0].waited), self._session.busy_seconds)
        if self._session.step == self._first + 1:
            self._compare_records()

    def end_epoch(self) -> None:
        """Compares what the workers have read, and warns if their input is too slow."""
        self._compare_records()
        self._wait.warn(self._session.rank, self.pipeline.options)

    def end_fit(self) -> None:
        """Releases the data."""
        pipeline, self._running = self._running, None
        self.announced, self._may_iterate = None, False
        self._stop_drawing()
        if pipeline is not None:
            self._wait.warn(self._session.rank, pipeline.options)
            pipeline.source.close()

    def _stop_drawing(self) -> None:
        """Ends the threads that read ahead: Keras does not end a fit that has failed."""
        for iterator in self.iterators:
            iterator.stop()
        self._drawn = []

    def _compare_records(self) -> None:
        """Checks that all workers have read the same records; a collective."""
        records = self.pipeline.source.records
        if records is None:
            return
        try:
            handshake.compare(
                self._session.collectives, {"records": records.at(self._session.step - 1)}
            )
        except DisagreementError as error:
            self._stop_drawing()
            raise DisagreementError(
                f"workers have read different records up to step {self._session.step - 1}: the "
                "data must be whole and have the same order on all workers (remove shard(); give "
                "every shuffle() a seed; keep map() and interleave() deterministic; sort lists of "
                "files; call keras.utils.set_random_seed before a PyDataset draws from np.random)"
            ) from error


def _of_training(work: npt.ArrayLike | None, source: Source) -> npt.ArrayLike | None:
    """Returns the work of the samples that are not kept for validation."""
    total = source.num_samples + source.validation_samples
    if work is None or source.by_batch or np.shape(work) != (total,):
        return work
    return np.asarray(work)[: source.num_samples]


class InputWait:
    """Time for which the steps of a fit have waited for input; one warning if it is long."""

    def __init__(self) -> None:
        self._waited = self._busy = 0.0
        self._last = math.inf, math.inf
        self._steps = 0
        self._warned = False

    def add(self, waited_seconds: float, busy_seconds: float) -> None:
        """Adds a step, from sums over all so far; an excluded one does not add to the busy time."""
        if busy_seconds > self._last[1]:
            self._waited += waited_seconds - self._last[0]
            self._busy += busy_seconds - self._last[1]
            self._steps += 1
        self._last = waited_seconds, busy_seconds

    def warn(self, rank: int, options: InputOptions) -> None:
        """Logs a warning, once, if waits are a large share of the busy time."""
        longest = max(MAX_WAIT * self._busy, MIN_WAIT_SECONDS * self._steps)
        if self._warned or self._waited <= longest:
            return
        self._warned = True
        logger.warning(
            "worker %d waits for input in %.0f %% of its busy time (%.1f of %.1f ms per step): "
            "raise readers (now %d) or prefetch (now %d) of balancer.dataset(...), or do less in "
            "map=",
            rank,
            100 * self._waited / self._busy,
            1e3 * self._waited / self._steps,
            1e3 * self._busy / self._steps,
            options.readers,
            options.prefetch,
        )
