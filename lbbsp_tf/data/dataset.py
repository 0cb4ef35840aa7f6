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
from dataclasses import dataclass, field, replace
from functools import cached_property

import tensorflow as tf
from tensorflow.python.distribute.input_lib import DistributedDatasetsFromFunction

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_tf.compat import Nest
from lbbsp_tf.data.mapping import SampleMap, composed, keeping_rows, over_samples
from lbbsp_tf.data.options import InputOptions
from lbbsp_tf.data.source import Plan, SharedReads, Source


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Batches of one `LoadBalancer.dataset`, drawn by the plans.

    Args:
        session: Session with the plans.
        order: Samples of each step.
        source: Data of all workers, which several pipelines may share.
        options: What the data set was given; `prefetch` batches need a lag of ``1 + prefetch``.
        batch_maps: Functions of this worker's batch, applied in turn.
        reads: See `Plan`.
    """

    session: WorkerSession
    order: GlobalOrder
    source: Source
    options: InputOptions
    batch_maps: tuple[SampleMap, ...] = ()
    reads: SharedReads = field(default_factory=lambda: SharedReads(1))

    @cached_property
    def _plan(self) -> Plan:  # kept alive with the pipeline
        return Plan(self.session, self.order, self.source, self.reads)

    @cached_property
    def batches(self) -> tf.data.Dataset:
        """This worker's batches of an epoch, from the step that is running when it is opened on."""
        batches = self._mapped(self._plan.batches())
        if self.options.prefetch:
            batches = batches.prefetch(self.options.prefetch)
        return batches.with_options(self._tf_options())

    def batch_of(self, samples: tf.Tensor) -> Nest:
        """Returns the batch of some samples of the running step, in the graph of a step."""
        with tf.device("/CPU:0"):
            batch = self._plan.rows(samples)
            for function in map(tf.function, self._functions()):  # converted as by tf.data
                batch = function(*batch) if isinstance(batch, tuple) else function(batch)
        return batch

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
            return next(iter(self._mapped(raw).with_options(self._tf_options())))

    def of_replicas(self, sessions: Sequence[WorkerSession]) -> Sequence[Pipeline]:
        """Returns a pipeline of the same data for each replica of this process, for one fit."""
        if len(sessions) == 1:
            return [self]
        reads = SharedReads(len(sessions))
        return [replace(self, session=session, reads=reads) for session in sessions]

    def _mapped(self, batches: tf.data.Dataset) -> tf.data.Dataset:
        """Applies the functions of samples and of batches."""
        for function in self._functions():
            batches = batches.map(function)
        return batches

    def _functions(self) -> Iterator[SampleMap]:
        """Yields functions of a batch, to be applied in turn."""
        per_sample = composed(self.source.restore, self.options.map)
        if per_sample is not None:
            yield over_samples(per_sample, self.options.readers, self.options.padded)
        yield from map(keeping_rows, self.batch_maps)

    def _tf_options(self) -> tf.data.Options:
        """Returns options without automatic parallel maps and prefetching, which draw ahead."""
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        options.experimental_optimization.inject_prefetch = False
        options.experimental_optimization.map_parallelization = False
        # The default pool has one thread per core. Threads that wait for another replica, or for a
        # tf.data.Dataset, must not hold up what is read.
        readers = self.options.readers
        if readers > 1 or self.reads.replicas > 1 or self.source.is_sequential:
            options.threading.private_threadpool_size = readers + 2
        return options


class PlaceholderDataset(DistributedDatasetsFromFunction):
    """Endless placeholders of one sample, over which `fit` iterates under a strategy.

    Keras recognises data sets by TensorFlow's classes, so this is a subclass of one. It applies
    class weights by ``data.map(f).prefetch(n)``, methods that TensorFlow's class lacks.

    Args:
        pipeline: Pipeline from which the steps draw.
        strategy: Strategy of the workers.
        announce: Called with the pipeline when Keras builds a model for this data.
        check_iteration: Called with the pipeline when an iteration starts.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        strategy: tf.distribute.Strategy,
        announce: Callable[[Pipeline], None],
        check_iteration: Callable[[Pipeline], None],
    ) -> None:
        endless = tf.data.Dataset.from_tensors(pipeline.example).repeat()
        self.__dict__.update(vars(strategy.distribute_datasets_from_function(lambda _: endless)))
        self.pipeline, self._announce, self._check = pipeline, announce, check_iteration
        self.map = lambda function: PlaceholderDataset(
            replace(pipeline, batch_maps=(*pipeline.batch_maps, function)),
            *(strategy, announce, check_iteration),
        )

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, of a fit that is given none."""
        return self.pipeline.order.steps_per_epoch

    def example(self) -> Nest:
        """Returns a batch of one sample, from which Keras builds the model."""
        self._announce(self.pipeline)
        return self.pipeline.example

    def __iter__(self) -> Iterator[Nest]:
        self._check(self.pipeline)
        # Iterators of TensorFlow's strategies have threads, see `compat.evaluation.Rows`.
        return itertools.repeat(self.pipeline.example)

    def prefetch(self, count: int) -> PlaceholderDataset:
        """Returns the data set itself, since placeholders need no prefetching."""
        return self
