"""Sources of training data, and the plan by which a worker draws from one."""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from lbbsp_core import GlobalOrder
from lbbsp_core.order import Indices
from lbbsp_core.runtime.exchange.digest import Digest, sampled
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_tf.compat import Array, Nest

_TOGETHER = 8
"""Number of samples that are read together to compare them: they may be large."""


class Draw(NamedTuple):
    """What a worker draws in a step."""

    step: int  # counted over the whole run
    number_of_pass: int
    place: int  # of the step in its pass
    samples: Indices  # of this worker
    once: Callable[[Callable[[], Any]], Any]  # calls a function once for all replicas of a process


class Fingerprints:
    """Running fingerprint of the records that a worker has read, by global step."""

    def __init__(self) -> None:
        self._value = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=1024)

    def add(self, step: int, data: bytes) -> None:
        """Adds the records of a global step, unless they have been read before."""
        if self._recent and step <= self._recent[-1][0]:
            return
        self._value = zlib.crc32(data, self._value)
        self._recent.append((step, self._value))

    def forget_from(self, step: int) -> None:
        """Forgets `step` and later ones, which were read ahead by a fit that has ended."""
        while self._recent and self._recent[-1][0] >= step:
            self._recent.pop()
        self._value = self._recent[-1][1] if self._recent else 0

    def at(self, step: int) -> int:
        """Returns the fingerprint of all records up to those of `step`; 0 if it was not read."""
        return next((value for at, value in reversed(self._recent) if at == step), 0)


class Source(ABC):
    """Training data of all workers, from which each of them reads its own samples."""

    num_samples: int  # of a pass over the data
    specs: Sequence[tf.TensorSpec]  # of what `read` returns
    structure: Nest  # into which `pack` packs it
    validation_samples = 0  # that follow them, and are not trained on
    by_batch = False  # whether the items of the data set are global batches
    is_sequential = False  # whether the data can only be read in its own order
    is_reshuffled = False  # whether that order cannot be continued in its middle
    in_memory = False  # whether reading takes negligible time
    validation_data: Nest = None
    restore: Callable[..., Nest] | None = None
    """Makes a sample of an element of a batch; None if batches contain the samples as they are."""
    records: Fingerprints | None = None
    """Fingerprints of what was read, if workers may read different data."""

    @abstractmethod
    def rows(self, index: Indices) -> list[Array]:
        """Reads samples: any of them, or only those of the first step if there are `records`."""

    def read(self, draw: Draw) -> list[Array]:
        """Reads this worker's samples of a step; called on threads of `tf.data`."""
        return self.rows(draw.samples)

    def pack(self, tensors: Sequence[tf.Tensor]) -> Nest:
        """Returns the batch of what was read; called in the graph of `tf.data`."""
        return tf.nest.pack_sequence_as(self.structure, tensors, expand_composites=True)

    def example(self, index: Indices) -> Nest:
        """Returns a batch of samples of the first step, on the CPU."""
        with tf.device("/CPU:0"):
            rows = zip(self.rows(index), self.specs, strict=True)
            return self.pack([tf.constant(values, spec.dtype) for values, spec in rows])

    def read_digests(self) -> Sequence[Digest]:
        """Reads some samples, the same on all workers, and returns digests of their leaves."""
        index = sampled(self.num_samples)
        parts = np.split(index, range(_TOGETHER, len(index), _TOGETHER))
        return [digest for part in parts for digest in digests_of(self.example(part))]

    @cached_property
    def digests(self) -> Sequence[Digest]:
        """What `read_digests` has returned the first time."""
        return self.read_digests()

    def continue_at(self, number: int) -> None:  # noqa: B027
        """Begins the next fit with a pass whose predecessors have been read in this process."""

    def close(self) -> None:  # noqa: B027
        """Ends the last pass of a fit."""


def digests_of(samples: Nest) -> list[Digest]:
    """Returns a digest of each sample and leaf of a batch; ragged and sparse leaves have one."""
    digests = []
    for leaf in tf.nest.flatten(samples):
        parts = [np.asarray(part) for part in tf.nest.flatten(leaf, expand_composites=True)]
        numbers = [_as_numbers(part) for part in parts]
        if len(parts) == 1:
            digests += [Digest.of([row]) for row in numbers[0]]
        else:
            digests.append(Digest.of(numbers))
    return digests


def _as_numbers(values: Array) -> Array:
    """Replaces texts by their hashes, and complex numbers by pairs."""
    if values.dtype.kind in "OSU":
        hashes = [zlib.crc32(text) for text in string_bytes(values).flat]
        return np.reshape(hashes, values.shape).astype(np.float64)
    return values.view(values.real.dtype) if values.dtype.kind == "c" else values


def type_of(values: Array) -> tf.DType:
    """Returns the type of TensorFlow for an array; raises a `TypeError` if there is none."""
    return tf.as_dtype(string_bytes(values).dtype.newbyteorder("="))


def spec_of(rows: Array) -> tf.TensorSpec:
    """Returns the specification of a batch of any size; raises a `TypeError` if there is none."""
    return tf.TensorSpec([None, *rows.shape[1:]], type_of(rows))


def as_type(values: Array, dtype: tf.DType) -> Array:
    """Returns values that TensorFlow can take, in the data type of the first sample."""
    values = string_bytes(values)
    if dtype == tf.string and values.dtype != object:
        raise TypeError(f"got {values.dtype} instead of {dtype.name}")
    return values.astype(dtype.as_numpy_dtype, casting="same_kind", copy=False)


def string_bytes(values: Array) -> Array:
    """Encodes strings and paths as bytes; leaves numbers as they are."""
    if values.dtype.kind not in "OUST":
        return values
    encoded = np.empty(values.shape, object)
    encoded.flat[:] = [v if isinstance(v, bytes) else os.fsencode(v) for v in values.flat]
    return encoded


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
            future, requests = self._reads.setdefault(step, (Future(), []))
            requests.append(None)
            if len(requests) == self.replicas:
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
        self._lock = threading.Lock()  # parts of a step are read while the next batch is

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

    def rows(self, samples: tf.Tensor) -> Nest:
        """Returns the batch of some samples of the running step, in a graph."""
        return self._source.pack(self._call(Plan._rows, [samples], self._source.specs))

    def _rows(self, samples: Indices) -> list[Array]:
        with self._lock:
            return self._source.rows(samples)

    def _first_step(self) -> list[np.int64]:
        self._session.use_order(self._order)
        return [np.int64(self._session.step)]

    def _read(self, number: np.int64) -> list[Array]:
        step = int(number)
        place = divmod(self._session.step_of_order(step), self._order.steps_per_pass)
        samples = self._session.local_indices(step)
        once = lambda read: self._reads.get(step, read)  # noqa: E731
        with self._lock:
            return self._source.read(Draw(step, *place, samples, once))

    def _call(
        self,
        method: Callable[..., Sequence[Array | np.int64]],
        inputs: Sequence[tf.Tensor],
        specs: Sequence[tf.TensorSpec],
    ) -> list[tf.Tensor]:
        """Calls a method with arrays, from the graph."""
        # TensorFlow keeps the function of a `tf.numpy_function` in the default graph until the
        # process ends, with all data that it refers to. So it gets a weak reference.
        weak = weakref.ref(self)

        def run(*arrays: Array) -> Sequence[Array | np.int64]:
            plan = weak()
            if plan is None:
                raise RuntimeError(
                    "the data set is read after its balancer and pipeline were deleted"
                )
            return method(plan, *arrays)

        tensors: list[tf.Tensor] = tf.numpy_function(run, inputs, [spec.dtype for spec in specs])
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape(spec.shape)
        return tensors
