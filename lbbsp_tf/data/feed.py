"""Input of the fits of one `LoadBalancer`: its data sets, and what is checked while they train."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.exchange.protocol import DisagreementError
from lbbsp_tf.compat import Nest
from lbbsp_tf.data.dataset import BatchIterator, PlaceholderDataset, PlannedPipeline
from lbbsp_tf.data.mapping import SampleMap
from lbbsp_tf.data.sources import Arrays, Batches, Source, open_source
from lbbsp_tf.data.stream import Stream
from lbbsp_tf.exchange.replicas import ReplicaSessions

logger = logging.getLogger("lbbsp.tf")

MAX_WAIT = 0.2
"""Share of the busy time that steps may wait for input before a warning is logged."""

MIN_WAIT_SECONDS = 0.005
"""Wait per step below which no warning is logged."""


class TrainingInput:
    """Input of one balancer: from `dataset` to the end of the fit that trains on it."""

    def __init__(self, sessions: ReplicaSessions, strategy: tf.distribute.Strategy) -> None:
        self._sessions = sessions
        self._session = sessions.leader
        self._strategy = strategy
        self._announced: PlannedPipeline | None = None
        self._pipeline: PlannedPipeline | None = None
        self.latest: PlannedPipeline | None = None
        self._drawn: Sequence[PlannedPipeline] = []
        self.iterators: list[BatchIterator] = []  # the same for data sets of one structure
        self._may_iterate = False
        self._steps = self._end = 0
        self._wait = InputWait()

    @property
    def order(self) -> GlobalOrder | None:
        """Order of the data set that a fit was given last, or else of the latest one."""
        pipeline = self._announced or self.latest
        return pipeline.order if pipeline else None

    @property
    def is_announced(self) -> bool:
        """True if the data set that Keras has built the model for came from `dataset`."""
        return self._announced is not None

    @property
    def spec(self) -> str:
        """Shapes and types of batches, as text."""
        return str(self._pipeline.batches.element_spec)

    @property
    def validation_data(self) -> Nest:
        """Samples that the latest data set keeps for validation; None without any."""
        source = self.latest.source if self.latest else None
        return source.validation_data if isinstance(source, Arrays) else None

    def dataset(
        self,
        x: Nest,
        y: Nest = None,
        sample_weight: Nest = None,
        *,
        seed: int | None,
        map: SampleMap | None,
        batch_map: SampleMap | None,
        shuffle: bool | None,
        steps_per_epoch: int | None,
        validation_split: float,
        num_samples: int | None,
        batched: bool | None,
        padded: bool | None,
        readers: int,
        prefetch: int | None,
        work: npt.ArrayLike | None,
    ) -> tf.data.Dataset | PlaceholderDataset:
        """Creates the training data of a fit; see `LoadBalancer.dataset`."""
        for name, value, minimum in (("readers", readers, 1), ("prefetch", prefetch or 0, 0)):
            if value != int(value) or value < minimum:
                raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
        size = self._session.balancer.constraints.global_batch_size
        source: Source
        if isinstance(x, tf.data.Dataset):
            _refuse_for_streams(
                y=y,
                sample_weight=sample_weight,
                validation_split=validation_split or None,
                shuffle=shuffle,
                seed=seed,
                work=work,
            )
            source = Stream(
                x,
                size,
                num_samples=num_samples,
                steps_per_epoch=steps_per_epoch,
                batched=batched,
            )
            shuffle = False
        else:
            if num_samples is not None or batched is not None:
                raise ValueError(
                    "num_samples and batched are options for a tf.data.Dataset only: leave them out"
                )
            source = open_source(
                x,
                y,
                sample_weight,
                global_batch_size=size,
                readers=int(readers),
                any_length=padded is not None,
                validation_split=validation_split,
            )
        if prefetch is None:
            prefetch = int(not source.in_memory or map is not None)
        order = self._session.make_order(
            source.num_samples,
            seed,
            shuffle=shuffle is not False,
            steps_per_epoch=steps_per_epoch,
            by_batch=source.by_batch,
            work=_of_training(work, source),
        )
        if isinstance(source, Batches) and order == self._session.order:
            step = self._session.step_of_order(self._session.step)
            source.continue_at(step // order.steps_per_pass)
        pipeline = PlannedPipeline(
            self._session,
            order,
            source,
            sample_map=map,
            batch_maps=(batch_map,) if batch_map else (),
            padded=padded,
            readers=int(readers),
            prefetch=int(prefetch),
        )
        self.latest = pipeline
        if self._session.workers == 1:
            self._session.use_order(order)
            return pipeline.epoch()
        return PlaceholderDataset(
            pipeline, self._strategy, on_build=self._announce, on_iterate=self._check_iteration
        )

    # A fit, in the order of its events

    def _announce(self, pipeline: PlannedPipeline) -> None:
        """Notes which data set Keras builds the model for, before the fit starts."""
        self._announced = pipeline
        self._may_iterate = False

    def begin_fit(self) -> None:
        """Prepares the session for the announced data set; call it when the training begins."""
        pipeline, self._announced = self._announced, None
        self._pipeline = self.latest = pipeline
        self._sessions.use_order(pipeline.order)
        self._sessions.use_lag(1 + pipeline.prefetch)
        self._may_iterate = True
        self._steps = 0
        self._wait = InputWait()

    def compare_samples(self) -> None:
        """Compares some samples with those of the other workers; a collective.

        Samples of a stream are compared as they are read, and those that are another time
        different on any worker (augmented at random) are not compared.
        """
        source = self._pipeline.source
        if source.records is not None:
            return
        digests = source.digests
        if self._session.any_worker(digests is None):
            return
        try:
            self._session.check_samples(digests)
        except DisagreementError:  # which all workers find
            if not self._session.any_worker(source.read_digests() != digests):
                raise

    def _check_iteration(self, pipeline: PlannedPipeline) -> None:
        """Allows one iteration of the announced data set, that of a fit that has begun."""
        if self._may_iterate and pipeline is self._pipeline:
            self._may_iterate = False
            return
        if self._pipeline is not None:
            raise ValueError(
                "validation_data must be arrays or a tf.data.Dataset: only the training step can "
                "draw from balancer.dataset(...)"
            )
        raise ValueError(
            "balancer.dataset(...) can only be trained on by fit(..., callbacks=[balancer]): pass "
            "the balancer as a callback; evaluate and predict take arrays or a tf.data.Dataset"
        )

    @property
    def is_reshuffled(self) -> bool:
        """True if the order of the latest data set cannot be continued in its middle."""
        source = self.latest.source
        return isinstance(source, Stream) and source.is_reshuffled

    def begin_epochs(self) -> None:
        """Starts to draw at the session's running step; call it when the first epoch begins."""
        spec = self._pipeline.batches.element_spec
        if not self.iterators or self.iterators[0].element_spec != spec:
            self.iterators = [BatchIterator(spec) for _ in self._sessions]
        if self._pipeline.source.records is not None:
            self._pipeline.source.records.forget_from(self._session.step)
        # Iterators do not keep their pipelines alive.
        self._drawn = self._pipeline.of_replicas(self._sessions)
        self._draw_epoch()

    def _draw_epoch(self) -> None:
        self._end = self._session.step + self._pipeline.order.steps_per_epoch
        for iterator, pipeline in zip(self.iterators, self._drawn, strict=True):
            iterator.start(pipeline)

    def first_samples(self, count: int) -> Nest:
        """Returns the first samples of the data set, the same on all workers."""
        return self._pipeline.first_samples(count)

    def begin_step(self) -> None:
        """Draws a further epoch if one begins, of the announced data set, or raises ValueError."""
        if self._may_iterate:
            raise ValueError(
                "fit needs the data of the balancer: call fit(balancer.dataset(x, y), ...)"
            )
        if self._session.step == self._end:
            self._draw_epoch()

    def end_step(self) -> None:
        """Adds up the time that the step has waited; compares the first records of a fit."""
        self._wait.add(self.iterators[0].waited_seconds, self._session.busy_seconds)
        self._steps += 1
        if self._steps == 1:
            self._compare_records()

    def end_epoch(self) -> None:
        """Compares what the workers have read, and warns if their input is too slow."""
        self._compare_records()
        self._warn_of_waits()

    def end_fit(self) -> None:
        """Releases the data."""
        if self._pipeline is not None:
            self._warn_of_waits()
        self.forget_fit()
        for iterator in self.iterators:
            iterator.stop()
        self._drawn = []
        if self.latest is not None and isinstance(self.latest.source, (Batches, Stream)):
            self.latest.source.close()

    def forget_fit(self) -> None:
        """Forgets a fit that has ended or failed."""
        self._announced = self._pipeline = None
        self._may_iterate = False

    def _compare_records(self) -> None:
        """Checks that all workers have read the same records; a collective."""
        records = self._pipeline.source.records
        if records is None:
            return
        try:
            self._session.check_same("records", records.at(self._session.step - 1))
        except DisagreementError as error:
            raise DisagreementError(
                f"workers have read different records up to step {self._session.step - 1}: the "
                "data must be whole and have the same order on all workers (remove shard(); give "
                "every shuffle() a seed; keep map() and interleave() deterministic; sort lists of "
                "files; call keras.utils.set_random_seed before a PyDataset draws from np.random)"
            ) from error

    def _warn_of_waits(self) -> None:
        pipeline = self._pipeline
        self._wait.warn(self._session.rank, readers=pipeline.readers, prefetch=pipeline.prefetch)


def _refuse_for_streams(**options: object) -> None:
    """Raises an error for options that have no effect on a `tf.data.Dataset`."""
    for name, value in options.items():
        if value is None:
            continue
        remedy = {
            "validation_split": "split it with take() and skip(), and pass validation_data= to fit",
            "shuffle": "call its shuffle(buffer_size, seed=...) first",
            "seed": "call its shuffle(buffer_size, seed=...) first",
            "work": "its samples have no numbers; pass arrays, or an object with __len__ and "
            "__getitem__ whose items are samples",
        }.get(name, "let its elements be (x, y) or (x, y, sample_weight)")
        raise ValueError(f"{name} must not be given for a tf.data.Dataset: {remedy}")


def _of_training(work: npt.ArrayLike | None, source: Source) -> npt.ArrayLike | None:
    """Returns the work of the samples that are not kept for validation."""
    given = source.given_samples if isinstance(source, Arrays) else source.num_samples
    if work is None or source.by_batch or np.shape(work) != (given,):
        return work
    return np.asarray(work)[: source.num_samples]


class InputWait:
    """Time for which the steps of a fit have waited for input; one warning if it is long."""

    def __init__(self) -> None:
        self._waited = self._busy = 0.0
        self._last: tuple[float, float] | None = None
        self._steps = 0
        self._warned = False

    def add(self, waited_seconds: float, busy_seconds: float) -> None:
        """Adds a step, from sums over all so far; an excluded one does not add to the busy time."""
        if self._last is not None and busy_seconds > self._last[1]:
            self._waited += waited_seconds - self._last[0]
            self._busy += busy_seconds - self._last[1]
            self._steps += 1
        self._last = waited_seconds, busy_seconds

    def warn(self, rank: int, *, readers: int, prefetch: int) -> None:
        """Logs a warning, once, if waits are a large share of the busy time."""
        if self._warned or self._waited <= max(
            MAX_WAIT * self._busy, MIN_WAIT_SECONDS * self._steps
        ):
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
            readers,
            prefetch,
        )
