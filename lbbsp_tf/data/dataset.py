"""Draw: takes the samples that the plan of each step gives to this worker.

TensorFlow's distributed iterators prefetch batches on background threads, before the plan of the
step is decided. Under a strategy `fit` therefore iterates over *placeholders* of one sample each,
from which Keras learns only the structure of the data. The step itself draws its batch from a
local pipeline when it starts. The pipeline prefetches only as many batches as the lag of the plans
allows, so that no thread has to wait for a plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import tensorflow as tf
from tensorflow.python.distribute.input_lib import DistributedDatasetsFromFunction

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_tf import compat
from lbbsp_tf.compat import Nest
from lbbsp_tf.data.host import HostCalls
from lbbsp_tf.data.iteration import SharedReads, SwitchingIterator
from lbbsp_tf.data.mapping import SampleMap, over_samples
from lbbsp_tf.data.sources import Draw, Source
from lbbsp_tf.rows import count_rows, first_leaf


class SessionPlan:
    """Plan of a session for an order of samples.

    Args:
        session: Session that decides the sizes of the batches.
        order: Samples of each step.
        reads: See `Plan`.
    """

    def __init__(
        self, session: WorkerSession, order: GlobalOrder, reads: SharedReads | None = None
    ) -> None:
        self._session = session
        self.order = order
        self.reads = reads

    def first_step(self) -> int:
        """Returns the running step, at which an iteration starts."""
        self._session.use_order(self.order)
        return self._session.step

    def draw(self, step: int) -> Draw:
        """Returns this worker's samples of a step."""
        return Draw(self._session.step_of_order(step), self._session.local_indices(step))


class PlannedPipeline:
    """Batches of one `LoadBalancer.dataset`, drawn by the plans.

    Args:
        session: Session with the plans; several pipelines may share a source.
        order: Samples of each step.
        source: Data of all workers.
        sample_map: Function of each sample's tensors, as for `tf.data.Dataset.map`, or None.
        batch_maps: Functions of this worker's batch, applied in turn.
        padded: See `over_samples`.
        readers: Number of samples that `sample_map` processes at the same time.
        prefetch: Number of batches that are read ahead; needs a lag of ``1 + prefetch``.
        reads: See `Plan`.
    """

    def __init__(
        self,
        session: WorkerSession,
        order: GlobalOrder,
        source: Source,
        *,
        sample_map: SampleMap | None = None,
        batch_maps: tuple[SampleMap, ...] = (),
        padded: bool | None = None,
        readers: int = 1,
        prefetch: int = 0,
        reads: SharedReads | None = None,
    ) -> None:
        self._session = session
        self.order = order
        self.source = source
        self.prefetch = prefetch
        self._sample_map = sample_map
        self._batch_maps = batch_maps
        self._padded = padded
        self._reads = reads
        self._host = HostCalls()
        self.readers = readers

    @cached_property
    def batches(self) -> tf.data.Dataset:
        """This worker's batches of an epoch, from the step that is running when it is opened on."""
        plan = SessionPlan(self._session, self.order, self._reads)
        batches = self._mapped(self.source.batches(plan, self._host))
        if self.prefetch:
            batches = batches.prefetch(self.prefetch)
        return batches.with_options(self._options())

    def epoch(self) -> tf.data.Dataset:
        """Returns the batches of one epoch, for a single worker."""
        steps = self.order.steps_per_epoch
        epoch = self.batches.apply(tf.data.experimental.assert_cardinality(steps))
        epoch.pipeline = self  # keeps the Python functions alive
        return epoch

    @cached_property
    def example(self) -> Nest:
        """A batch of one sample."""
        return self.first_samples(1)

    def first_samples(self, count: int) -> Nest:
        """Returns a batch of the first samples, the same for all sessions."""
        with tf.device("/CPU:0"):
            raw = tf.data.Dataset.from_tensors(self.source.example(self.order.indices(0)[:count]))
            return next(iter(self._mapped(raw).with_options(self._options())))

    def with_batch_map(self, batch_map: SampleMap) -> PlannedPipeline:
        """Returns a pipeline of the same data that also applies `batch_map` to each batch."""
        return self._copy(self._session, (*self._batch_maps, batch_map))

    def of_replicas(self, sessions: Sequence[WorkerSession]) -> Sequence[PlannedPipeline]:
        """Returns a pipeline of the same data for each replica of this process, for one fit."""
        if len(sessions) == 1:
            return [self]
        reads: SharedReads = SharedReads(len(sessions))
        return [self._copy(session, self._batch_maps, reads) for session in sessions]

    def _copy(
        self,
        session: WorkerSession,
        batch_maps: tuple[SampleMap, ...],
        reads: SharedReads | None = None,
    ) -> PlannedPipeline:
        return PlannedPipeline(
            session,
            self.order,
            self.source,
            sample_map=self._sample_map,
            batch_maps=batch_maps,
            padded=self._padded,
            readers=self.readers,
            prefetch=self.prefetch,
            reads=reads,
        )

    def _mapped(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Applies the functions of samples and of batches."""
        per_sample = _composed(self.source.restore, self._sample_map)
        if per_sample is not None:
            batches = batches.map(
                over_samples(per_sample, readers=self.readers, padded=self._padded)
            )
        for batch_map in self._batch_maps:
            batches = batches.map(_keeping_rows(batch_map))
        return batches

    def _options(self) -> tf.data.Options:
        """Returns options without automatic parallel maps and prefetching, which draw ahead."""
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        options.experimental_optimization.inject_prefetch = False
        options.experimental_optimization.map_parallelization = False
        # The default pool has one thread per core. Threads that wait for another replica, or for a
        # tf.data.Dataset, must not hold up what is read.
        if self.readers > 1 or self._reads is not None or self.source.is_sequential:
            options.threading.private_threadpool_size = self.readers + 2
        return options


class BatchIterator:
    """Iterator from which a traced train step draws, over one pipeline after the other.

    A step that is traced once can so train on further data sets of the same structure.

    Args:
        element_spec: Structure of the batches of all pipelines.
    """

    def __init__(self, element_spec: Nest) -> None:
        self.element_spec = element_spec
        self._iterator = SwitchingIterator(element_spec)
        self._waited = compat.plain_variable(0.0, tf.float64)

    @property
    def waited_seconds(self) -> float:
        """Seconds for which steps have waited for their batches."""
        return float(self._waited)

    def start(self, pipeline: PlannedPipeline) -> None:
        """Draws from `pipeline` from now on, from the session's running step on."""
        self._iterator.start(pipeline.batches)

    def stop(self) -> None:
        """Ends the iteration, and releases its pipeline with the data."""
        self._iterator.stop()

    def next_batch(self) -> Nest:
        """Returns the running step's batch, as tensors in the step's graph."""
        with tf.device("/CPU:0"):
            asked = tf.timestamp()
            with tf.control_dependencies([asked]):
                batch = self._iterator.get_next()
            with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                self._waited.assign_add(tf.timestamp() - asked)
        return batch


class PlaceholderDataset(DistributedDatasetsFromFunction):
    """Endless placeholders of one sample, over which `fit` iterates under a strategy.

    Keras recognises data sets by TensorFlow's classes, so this is a subclass of one. It applies
    class weights by ``data.map(f).prefetch(n)``, methods that TensorFlow's class lacks.

    Args:
        pipeline: Pipeline from which the steps draw.
        strategy: Strategy of the workers.
        on_build: Called with the pipeline when Keras builds a model for this data.
        on_iterate: Called with the pipeline when an iteration starts; raises an error unless a
            balanced fit does so.
    """

    def __init__(
        self,
        pipeline: PlannedPipeline,
        strategy: tf.distribute.Strategy,
        *,
        on_build: Callable[[PlannedPipeline], None],
        on_iterate: Callable[[PlannedPipeline], None],
    ) -> None:
        endless = tf.data.Dataset.from_tensors(pipeline.example).repeat()
        distributed = strategy.distribute_datasets_from_function(lambda context: endless)
        vars(self).update(vars(distributed))
        self._pipeline = pipeline
        self._on_build = on_build
        self._on_iterate = on_iterate
        self.map = lambda function: PlaceholderDataset(
            pipeline.with_batch_map(function), strategy, on_build=on_build, on_iterate=on_iterate
        )

    def example(self) -> Nest:
        """Returns a batch of one sample, from which Keras builds the model."""
        self._on_build(self._pipeline)
        return self._pipeline.example

    def __iter__(self) -> Iterator[Nest]:
        self._on_iterate(self._pipeline)
        # Iterators of TensorFlow's strategies have threads, see `compat.evaluation.Rows`.
        return itertools.repeat(self._pipeline.example)

    def prefetch(self, count: int) -> PlaceholderDataset:
        """Returns the data set itself, since placeholders need no prefetching."""
        return self


def _keeping_rows(batch_map: SampleMap) -> SampleMap:
    """Wraps a function of a batch, to raise an error if it changes the number of rows.

    Workers are weighted by the samples that they were given.
    """

    def mapped(*batch: Nest) -> Nest:
        result = batch_map(*batch)
        check = tf.debugging.assert_equal(
            count_rows(first_leaf(result)),
            count_rows(first_leaf(batch)),
            "batch_map must return as many samples as it is given: let map= augment single samples",
        )
        with tf.control_dependencies([check]):
            return tf.nest.map_structure(tf.identity, result, expand_composites=True)

    return mapped


def _composed(first: SampleMap | None, then: SampleMap | None) -> SampleMap | None:
    """Returns a function of a sample that applies both functions; None stands for no function."""
    if first is None or then is None:
        return first or then

    def both(*sample: Nest) -> Nest:
        restored = first(*sample)
        return then(*restored) if isinstance(restored, tuple) else then(restored)

    return both
