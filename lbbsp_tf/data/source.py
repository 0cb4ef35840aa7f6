"""Source: training data with random access, of which each worker reads the samples of its plan.

Nothing is copied whole: arrays are indexed, and items read, batch by batch. Each kind of data has
a file: arrays, items that are samples, items that are global batches, and streams of records.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from lbbsp_core.order import Indices
from lbbsp_core.runtime.exchange.digest import Digest, sampled
from lbbsp_tf.compat import Nest

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
    """Makes a sample of an element of `batches`; None if these contain the samples as they are."""
    records: Fingerprints | None = None
    """Fingerprints of what was read, if workers may read different data."""

    @abstractmethod
    def rows(self, index: Indices) -> list[np.ndarray]:
        """Reads samples: any of them, or only those of the first step if there are `records`."""

    def read(self, draw: Draw) -> list[np.ndarray]:
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


def _as_numbers(values: np.ndarray) -> np.ndarray:
    """Replaces texts by their hashes, and complex numbers by pairs."""
    if values.dtype.kind in "OSU":
        hashes = [zlib.crc32(each) for each in string_bytes(values).flat]
        return np.reshape(hashes, values.shape).astype(np.float64)
    return values.view(values.real.dtype) if values.dtype.kind == "c" else values


def type_of(values: np.ndarray) -> tf.DType:
    """Returns the type of TensorFlow for an array; raises a `TypeError` if there is none."""
    return tf.as_dtype(string_bytes(values).dtype.newbyteorder("="))


def spec_of(rows: np.ndarray) -> tf.TensorSpec:
    """Returns the specification of a batch of any size; raises a `TypeError` if there is none."""
    return tf.TensorSpec([None, *rows.shape[1:]], type_of(rows))


def as_type(values: np.ndarray, dtype: tf.DType) -> np.ndarray:
    """Returns values that TensorFlow can take, in the data type of the first sample."""
    values = string_bytes(values)
    if dtype == tf.string and values.dtype != object:
        raise TypeError(f"got {values.dtype} instead of {dtype.name}")
    return values.astype(dtype.as_numpy_dtype, casting="same_kind", copy=False)


def string_bytes(values: np.ndarray) -> np.ndarray:
    """Encodes strings and paths as bytes; leaves numbers as they are."""
    if values.dtype.kind not in "OUST":
        return values
    encoded = np.empty(values.shape, object)
    encoded.flat = [v if isinstance(v, bytes) else os.fsencode(v) for v in values.flat]
    return encoded
