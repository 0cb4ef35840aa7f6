"""Plan by which a source is read: samples of this worker, and Python calls from graphs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from lbbsp_core import GlobalOrder
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_tf.data.source import Draw, Source


class SharedReads:
    """Reads of one process in a fit: each step is read once, for all replicas of the process.

    Each replica asks for every step once, in order, on its own threads. A replica may be ahead of
    others by the batches that it prefetches. The first to ask for a step reads it, and the others
    wait for the result. Reads never overlap, because whoever asks for a step has got the last one.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self._lock = threading.Lock()
        self._reads: dict[int, tuple[Future[Any], list[None]]] = {}

    def get(self, step: int, read: Callable[[], Any]) -> Any:
        """Returns what was read for a step, and forgets it when all replicas have asked for it."""
        with self._lock:
            is_first = step not in self._reads
            future, asked = self._reads.setdefault(step, (Future(), []))
            asked.append(None)
            if len(asked) == self.replicas:
                del self._reads[step]
        if is_first:
            try:
                future.set_result(read())
            except BaseException as error:  # every replica must learn of it
                future.set_exception(error)
        return future.result()


class Plan:
    """Plan of a session for the samples of a source.

    Data sets refer to it, so it must not refer to them: a data set in a cycle of references would
    be deleted by the garbage collector, which holds the GIL that its threads wait for.

    Args:
        session: Session that decides the sizes of the batches.
        order: Samples of each step.
        source: Data of all workers.
        reads: What the replicas of this process read together.
    """

    def __init__(
        self, session: WorkerSession, order: GlobalOrder, source: Source, reads: SharedReads
    ) -> None:
        self._session, self._order = session, order
        self._source, self._reads = source, reads

    def batches(self) -> tf.data.Dataset:
        """Returns the batches of an epoch, from the step that is running when it is opened on.

        They can be read as long as this object lives.
        """
        scalar, source = tf.TensorSpec([], tf.int64), self._source

        def steps(_: tf.Tensor) -> tf.data.Dataset:
            (first,) = self._call(Plan._first_step, [], [scalar])
            return tf.data.Dataset.range(first, first + self._order.steps_per_epoch)

        def batch(step: tf.Tensor) -> object:
            return source.pack(self._call(Plan._read, [step], source.specs))

        return tf.data.Dataset.from_tensors(0).flat_map(steps).map(batch)

    def _first_step(self) -> list[np.int64]:
        self._session.use_order(self._order)
        return [np.int64(self._session.step)]

    def _read(self, number: np.int64) -> list[np.ndarray]:
        step = int(number)
        place = divmod(self._session.step_of_order(step), self._order.steps_per_pass)
        samples = self._session.local_indices(step)
        once = lambda read: self._reads.get(step, read)  # noqa: E731
        return self._source.read(Draw(step, *place, samples, once))

    def _call(
        self,
        method: Callable[..., Sequence[np.ndarray]],
        inputs: Sequence[tf.Tensor],
        specs: Sequence[tf.TensorSpec],
    ) -> list[tf.Tensor]:
        """Calls a method with arrays, from the graph."""
        # TensorFlow keeps the function of a `tf.numpy_function` in the default graph until the
        # process ends, with all data that it refers to. So it gets a weak reference.
        weak = weakref.ref(self)

        def run(*arrays: np.ndarray) -> Sequence[np.ndarray]:
            plan = weak()
            if plan is None:
                raise RuntimeError(
                    "the data set is read after its balancer and pipeline were deleted"
                )
            return method(plan, *arrays)

        tensors = tf.numpy_function(run, inputs, [spec.dtype for spec in specs])
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape(spec.shape)
        return tensors
