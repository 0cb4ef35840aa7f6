"""Adapter for scripts that iterate over a ``DataIter`` of MXNet: `PlannedIter`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.io import DataBatch, DataDesc

Columns: TypeAlias = "Any | Sequence[Any] | Mapping[str, Any] | None"
Batch: TypeAlias = "tuple[list[mx.nd.NDArray], list[mx.nd.NDArray]]"
"""Data and labels."""

ARRAY_PARAMS = {"data_name": "data", "label_name": "softmax_label", "layout": "NCHW"}
"""Arguments of `PlannedIter` that describe arrays, and their defaults."""


class PlannedIter(mx.io.DataIter):
    """Data iterator whose batches are those that the plan of each step gives to this worker.

    A replacement for ``mx.io.NDArrayIter`` in an existing loop. No batch is padded: `pad` is 0,
    and the shapes of a batch are in its `provide_data` and `provide_label`.

    Args:
        sampler: Batch sampler, such as `Trainer.batch_sampler` creates; any iterable that yields
            lists of indices, once in every epoch.
        data: An ``NDArrayIter`` that does not shuffle; arrays as for ``NDArrayIter``; or a gluon
            data set whose samples are tuples, for example an ``ImageRecordDataset`` in place of an
            ``ImageRecordIter``.
        label: Arrays of labels, as for ``NDArrayIter``.
        data_name: Name of the data, if there is one array.
        label_name: Name of the labels, if there is one array.
        layout: Layout of the arrays, of which "N" is the axis of samples.
        **loading: For a gluon data set, options of ``DataLoader``, such as ``num_workers``.

    Raises:
        ValueError: The iterator shuffles.
        TypeError: The data cannot be read by index; names the remedy.

    Example::

        sampler = trainer.batch_sampler(len(images), seed=0)
        train_data = lbbsp_mx.PlannedIter(sampler, images, labels)
        for epoch in range(epochs):
            train_data.reset()
            for batch in train_data:
                ...
                trainer.step(batch.data[0].shape[0])
    """

    def __init__(
        self,
        sampler: Iterable[Sequence[int]],
        data: Columns | mx.io.NDArrayIter | gluon.data.Dataset,
        label: Columns = None,
        *,
        data_name: str = "data",
        label_name: str = "softmax_label",
        layout: str = "NCHW",
        **loading: Any,
    ) -> None:
        super().__init__(1)  # it describes batches of one sample until the first one is drawn
        self._layout = layout
        if isinstance(data, gluon.data.Dataset):
            loader = gluon.data.DataLoader(data, batch_sampler=sampler, **loading)
            self._epoch: Callable[[], Iterator[Batch]] = lambda: map(_halves, loader)
            self._current = _halves(loader._batchify_fn([data[0]]))
            named = zip((data_name, label_name), self._current, strict=True)
            self._names = [_numbered(name, len(part)) for name, part in named]
        elif loading:
            raise TypeError(
                f"only a gluon data set takes options of DataLoader, got {loading}: leave them "
                "out, or pass a gluon data set, such as gluon.data.ArrayDataset(data, label)"
            )
        else:
            source = array_iter(data, label, data_name, label_name, layout)
            self._layout = source.layout
            self._names = [[name for name, _ in part] for part in (source.data, source.label)]
            samples = ArraySamples(source)
            self._epoch = lambda: map(samples.take, sampler)
            self._current = samples[0]
        self._sampler = sampler
        self._axis = self._layout.find("N")
        self._iterator: Iterator[Batch] | None = None

    def __len__(self) -> int:
        """Returns the number of batches of an epoch: `accumulate` times that of its steps."""
        return len(self._sampler)  # type: ignore[arg-type]

    def reset(self) -> None:
        """Lets the next batch be the first of the next epoch; the rest of this one is skipped."""
        self._iterator = None

    def next(self) -> DataBatch:
        """Returns this worker's batch of the next step.

        Raises:
            StopIteration: The epoch has ended; `reset` lets the next one begin.
        """
        self._iterator = self._iterator or self._epoch()
        self._current = data, label = next(self._iterator)
        self.batch_size = data[0].shape[self._axis]
        return DataBatch(data, label, 0, None, None, self.provide_data, self.provide_label)

    def iter_next(self) -> bool:
        """Moves to the next batch; returns whether there is one."""
        try:
            self.next()
        except StopIteration:
            return False
        return True

    def getdata(self) -> list[mx.nd.NDArray]:
        """Returns the data of the current batch."""
        return self._of_current()[0]

    def getlabel(self) -> list[mx.nd.NDArray]:
        """Returns the labels of the current batch."""
        return self._of_current()[1]

    def getpad(self) -> int:
        """Returns 0, because no batch is padded."""
        return 0

    def _of_current(self) -> Batch:
        if self._iterator is None:
            raise ValueError("there is no current batch: call next or iter_next first")
        return self._current

    @property
    def provide_data(self) -> list[DataDesc]:
        """Names and shapes of the data of a batch of `batch_size` samples."""
        return self._described(0)

    @property
    def provide_label(self) -> list[DataDesc]:
        """Names and shapes of the labels of a batch of `batch_size` samples."""
        return self._described(1)

    def _described(self, half: int) -> list[DataDesc]:
        arrays, sizes = self._current[half], {self._axis: self.batch_size}
        shapes = [tuple(sizes.get(i, n) for i, n in enumerate(array.shape)) for array in arrays]
        named = zip(self._names[half], shapes, arrays, strict=True)
        return [DataDesc(name, shape, array.dtype, self._layout) for name, shape, array in named]


class ArraySamples(Sequence[Batch]):
    """Samples of the arrays of an ``NDArrayIter``, by number."""

    def __init__(self, source: mx.io.NDArrayIter) -> None:
        self._axis = source.layout.find("N")
        self._halves = [[array for _, array in part] for part in (source.data, source.label)]

    def __len__(self) -> int:
        return min(int(array.shape[self._axis]) for half in self._halves for array in half)

    def __getitem__(self, number: Any) -> Any:
        return self.take([number])

    def take(self, indices: Sequence[int]) -> Batch:
        """Returns a batch of the samples with these numbers."""
        if max(indices) >= len(self):
            raise IndexError(
                f"the sampler draws sample {max(indices)} of arrays of {len(self)} samples: create "
                "both for the same data set"
            )
        data, label = ([_take(part, indices, self._axis) for part in half] for half in self._halves)
        return data, label


def _halves(batch: Any) -> Batch:
    """Returns the data of a loader's batch, its first array, and its labels, the others."""
    parts = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    return parts[:1], parts[1:]


def _numbered(name: str, count: int) -> list[str]:
    """Returns the names of arrays, as ``NDArrayIter`` does."""
    return [name] if count == 1 else [f"_{number}_{name}" for number in range(count)]


def _take(array: Any, indices: Sequence[int], axis: int) -> mx.nd.NDArray:
    if isinstance(array, mx.nd.NDArray):
        where = mx.nd.array(indices, dtype="int64", ctx=array.context)
        return mx.nd.take(array, where, axis=axis)
    rows, places = np.unique(indices, return_inverse=True)  # h5py reads ascending rows only
    read = array[(slice(None),) * axis + (rows.tolist(),)]
    return mx.nd.array(np.take(read, places, axis))


def array_iter(
    data: Any, label: Columns, data_name: str, label_name: str, layout: str
) -> mx.io.NDArrayIter:
    """Returns a source of arrays as an ``NDArrayIter``, which checks and names them."""
    if isinstance(data, mx.io.DataIter) and not isinstance(data, mx.io.NDArrayIter):
        raise TypeError(
            f"{type(data).__name__} gives batches of a constant size and no sample by index: pass "
            "an NDArrayIter, arrays, or a gluon data set, such as "
            "gluon.data.vision.ImageRecordDataset in place of an ImageRecordIter"
        )
    if not isinstance(data, mx.io.NDArrayIter):
        # NDArrayIter replaces the values of a dict
        data, label = (dict(x) if isinstance(x, Mapping) else x for x in (data, label))
        data = mx.io.NDArrayIter(data, label, 1, False, "discard", data_name, label_name, layout)
    elif data.shuffle:
        raise ValueError(
            "shuffle must be False in the NDArrayIter, got True: each worker would shuffle the "
            "arrays differently; trainer.batch_sampler(...) shuffles alike on all workers"
        )
    if any(isinstance(part, mx.nd.sparse.BaseSparseNDArray) for _, part in data.data + data.label):
        raise TypeError("PlannedIter reads no sparse arrays: pass dense ones")
    return data
