"""Plan by which a source is read: samples of this worker, and Python calls from graphs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from lbbsp_core import GlobalOrder
from lbbsp_core.order import Indices
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_tf.compat import Nest

T = TypeVar("T")
HostFunction = Callable[..., Sequence[np.ndarray]]


class Draw(NamedTuple):
    """Samples of this worker in a step."""

    step: int  # counted from the start of the order
    samples: Indices


class HostCalls:
    """Calls of Python functions from graphs of `tf.data`, which live as long as this object."""

    def __init__(self) -> None:
        self._functions: list[HostFunction] = []

    def call(
        self, function: HostFunction, inputs: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
    ) -> list[tf.Tensor]:
        """Calls a function of arrays from the graph, or at once."""
        if tf.executing_eagerly():
            arrays = function(*(tensor.numpy() for tensor in inputs))
            return [tf.constant(v, spec.dtype) for v, spec in zip(arrays, specs, strict=True)]
        # TensorFlow keeps the function of a `tf.numpy_function` in the default graph until the
        # process ends, with all data that it refers to. So it gets a weak reference.
        weak, number = weakref.ref(self), len(self._functions)
        self._functions.append(function)

        def run(*arrays: np.ndarray) -> Sequence[np.ndarray]:
            calls = weak()
            if calls is None:
                raise RuntimeError(
                    "the data set is read after its balancer and pipeline were deleted"
                )
            return calls._functions[number](*arrays)

        tensors = tf.numpy_function(run, inputs, [spec.dtype for spec in specs])
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape(spec.shape)
        return tensors


class SharedReads(Generic[T]):
    """Reads of one process in a fit: each step is read once, for all replicas of the process.

    Each replica asks for every step once, in order, on its own threads. A replica may be ahead of
    others by the batches that it prefetches. The first to ask for a step reads it, and the others
    wait for the result. Reads never overlap, because whoever asks for a step has got the last one.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._lock = threading.Lock()
        self._reads: dict[int, tuple[Future[T], list[None]]] = {}

    def get(self, step: int, read: Callable[[], T]) -> T:
        """Returns what was read for a step, and forgets it when all replicas have asked for it."""
        with self._lock:
            is_first = step not in self._reads
            future, asked = self._reads.setdefault(step, (Future(), []))
            asked.append(None)
            if len(asked) == self._replicas:
                del self._reads[step]
        if is_first:
            try:
                future.set_result(read())
            except BaseException as error:  # every replica must learn of it
                future.set_exception(error)
        return future.result()


class Plan:
    """Plan of a session for an order of samples.

    Args:
        session: Session that decides the sizes of the batches.
        order: Samples of each step.
        reads: What the replicas of this process read together, if there are several; else None.
    """

    def __init__(
        self, session: WorkerSession, order: GlobalOrder, reads: SharedReads | None = None
    ) -> None:
        self._session = session
        self._reads = reads
        self.order = order

    def batches(
        self,
        host: HostCalls,
        read: Callable[[int, Draw], Sequence[np.ndarray]],
        specs: Sequence[tf.TensorSpec],
        pack: Callable[[list[tf.Tensor]], Nest],
    ) -> tf.data.Dataset:
        """Returns the batches of an epoch, from the step that is running when it is opened on.

        Args:
            host: Calls of Python functions, which live as long as the data set. They refer to this
                plan, which must not refer to them: a data set in a cycle of references would be
                deleted by the garbage collector, which holds the GIL that its threads wait for.
            read: Called in Python with a global step and this worker's samples of it.
            specs: Specifications of the arrays that it returns.
            pack: Called in the graph with their tensors; returns the batch.
        """
        session, scalar = self._session, tf.TensorSpec([], tf.int64)

        def first_step() -> list[np.int64]:
            session.use_order(self.order)
            return [np.int64(session.step)]

        def draw(step: np.int64) -> Sequence[np.ndarray]:
            number = int(step)
            drawn = Draw(session.step_of_order(number), session.local_indices(number))
            return read(number, drawn)

        def count(_: tf.Tensor) -> tf.data.Dataset:
            (step,) = host.call(first_step, [], [scalar])
            return tf.data.Dataset.range(step, step + self.order.steps_per_epoch)

        steps = tf.data.Dataset.from_tensors(0).flat_map(count)
        return steps.map(lambda step: pack(host.call(draw, [step], specs)))

    def read_once(self, step: int, read: Callable[[], T]) -> T:
        """Returns what was read for a step, once for all replicas of this process."""
        return self._reads.get(step, read) if self._reads else read()
