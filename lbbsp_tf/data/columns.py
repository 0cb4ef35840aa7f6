"""Columns: arrays of all kinds, indexed by batch, never copied whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from lbbsp_core.order import Indices
from lbbsp_tf.compat import Nest
from lbbsp_tf.data.host import HostCalls

_SCALARS = (str, bytes, os.PathLike, int, float, bool, np.generic)


class Column(Protocol):
    """Values of all samples along the first axis."""

    shape: tuple[int, ...]
    in_memory: bool  # reading takes negligible time

    def __len__(self) -> int: ...

    def take(self, index: tf.Tensor, host: HostCalls) -> tf.Tensor:
        """Returns the values of the samples `index`, as a tensor (or ragged or sparse tensor)."""
        ...

    def tail(self, start: int) -> Any:
        """Returns the values of the samples from `start` on, for validation."""
        ...


class HostColumn:
    """Column that Python reads: NumPy arrays, memory maps, HDF5 data sets, lists of strings."""

    def __init__(self, array: Any, name: str = "x") -> None:
        self._array, self._name = array, name
        self.shape = tuple(array.shape)
        self.in_memory = isinstance(array, np.ndarray) and not isinstance(array, np.memmap)
        self._refuse_missing()
        self._spec = spec_of(as_native(self._rows(np.zeros(1, np.int64))))

    def __len__(self) -> int:
        return self.shape[0]

    def take(self, index: tf.Tensor, host: HostCalls) -> tf.Tensor:
        """Returns the values of the samples `index`."""
        spec = tf.TensorSpec([None, *self._spec.shape[1:]], self._spec.dtype)
        (values,) = host.call(lambda index: [self._read(index)], [index], [spec])
        return values

    def tail(self, start: int) -> Any:
        """Returns the values of the samples from `start` on; strings as a tensor, for Keras."""
        values = self._read(np.arange(start, len(self)))
        return tf.constant(values) if values.dtype == object else values

    def _read(self, index: Indices) -> np.ndarray:
        try:
            return as_spec(self._rows(index), self._spec)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self._name} cannot be read as {self._spec.dtype.name} at samples "
                f"{index[:8].tolist()}: fill in missing values, and convert all to one type "
                f"({error})"
            ) from error

    def _refuse_missing(self) -> None:
        array = self._array
        is_objects = isinstance(array, np.ndarray) and array.dtype == object
        if is_objects and type(None) in set(map(type, array.flat)):
            raise _missing(self._name)

    def _rows(self, index: Indices) -> np.ndarray:
        first, last = int(index[0]), int(index[-1])
        if last - first + 1 == len(index) and np.all(np.diff(index) == 1):
            return np.asarray(self._array[first : last + 1])
        if isinstance(self._array, np.ndarray):
            return np.asarray(self._array[index])
        if type(self._array).__module__.startswith("h5py"):  # takes ascending indices only
            order = np.argsort(index)
            rows = self._array[index[order]]
            return rows[np.argsort(order)]
        return np.stack([np.asarray(self._array[int(i)]) for i in index])


class FrameColumn(HostColumn):
    """Column of a pandas data frame, or of a series as ``(samples, 1)``, as Keras reads them."""

    def __init__(self, frame: Any, name: str = "x") -> None:
        self._frame = frame.to_frame() if frame.ndim == 1 else frame
        super().__init__(self._frame, name)
        self.in_memory = True

    def _rows(self, index: Indices) -> np.ndarray:
        return self._frame.iloc[index].to_numpy()

    def _refuse_missing(self) -> None:
        for position, (name, kind) in enumerate(self._frame.dtypes.items()):
            is_number = isinstance(kind, np.dtype) and kind.kind != "O"
            if not is_number and self._frame.iloc[:, position].isna().any():
                raise _missing(f"{self._name}[{name!r}]")


class TensorColumn:
    """Column of a `tf.Tensor` or `tf.RaggedTensor`, kept in host memory."""

    in_memory = True

    def __init__(self, tensor: tf.Tensor | tf.RaggedTensor) -> None:
        with tf.device("/CPU:0"):
            self._tensor = tf.nest.map_structure(tf.identity, tensor, expand_composites=True)
        self.shape = tuple(tensor.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def take(self, index: tf.Tensor, host: HostCalls) -> tf.Tensor:
        """Returns the values of the samples `index`."""
        return tf.gather(self._tensor, index)

    def tail(self, start: int) -> Any:
        """Returns the values of the samples from `start` on."""
        return self._tensor[start:]


class SparseColumn:
    """Column of a sparse matrix, of TensorFlow or SciPy."""

    in_memory = True

    def __init__(self, tensor: tf.SparseTensor) -> None:
        self._tensor = tf.sparse.reorder(tensor)
        self.shape = tuple(tensor.shape)
        self._places = self._tensor.indices.numpy()
        self._values = self._tensor.values.numpy()
        self._starts = np.searchsorted(self._places[:, 0], np.arange(self.shape[0] + 1))

    def __len__(self) -> int:
        return self.shape[0]

    def take(self, index: tf.Tensor, host: HostCalls) -> tf.SparseTensor:
        """Returns the values of the samples `index`, as a sparse tensor."""
        specs = [
            tf.TensorSpec([None, len(self.shape)], tf.int64),
            tf.TensorSpec([None], self._tensor.dtype),
            tf.TensorSpec([len(self.shape)], tf.int64),
        ]
        rows = tf.SparseTensor(*host.call(self._read, [index], specs))
        rows.set_shape([None, *self.shape[1:]])
        return rows

    def tail(self, start: int) -> tf.SparseTensor:
        """Returns the values of the samples from `start` on."""
        size = [len(self) - start, *self.shape[1:]]
        return tf.sparse.slice(self._tensor, [start] + [0] * len(self.shape[1:]), size)

    def _read(self, index: Indices) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        lengths = self._starts[index + 1] - self._starts[index]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        kept = np.repeat(self._starts[index], lengths) + within
        places = self._places[kept]
        places[:, 0] = np.repeat(np.arange(len(index)), lengths)
        return places, self._values[kept], np.array([len(index), *self.shape[1:]], np.int64)


def map_columns(name: str, value: Nest) -> Nest:
    """Makes a column of each array in a nest; lists of arrays become tuples."""
    if isinstance(value, Mapping):
        return {key: map_columns(f"{name}[{key!r}]", each) for key, each in value.items()}
    if isinstance(value, list) and value and all(isinstance(each, _SCALARS) for each in value):
        return column(name, np.array(value, dtype=object if _is_text(value[0]) else None))
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(each, list) for each in value):
            raise ValueError(
                f"{name} must be arrays, got a list of lists: pass np.asarray({name}), or "
                f"tf.ragged.constant({name}) if the lists have different lengths"
            )
        parts = [map_columns(f"{name}[{i}]", each) for i, each in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return column(name, value)


def column(name: str, array: Any) -> Column:
    """Makes a column of an array."""
    kind = _kind(array)
    if kind is HostColumn and not _is_indexed_array(array):
        array = np.asarray(array)
    if hasattr(array, "shape") and not len(array.shape):
        raise ValueError(
            "the data must be arrays whose first axis is that of samples, got "
            f"{name} = {array!r}: pass one array per input"
        )
    if len(array.shape) and array.shape[0] == 0:
        raise ValueError(f"{name} has no samples: its shape is {tuple(array.shape)}")
    try:
        if issubclass(kind, HostColumn):
            return kind(array, name)
        return kind(_as_coo(array) if kind is SparseColumn else array)
    except TypeError as error:
        raise ValueError(
            f"{name} must be numbers or strings, got values of the "
            f"type {getattr(array, 'dtype', 'object')}: convert "
            "them first (for samples of different length, pass tf.ragged.constant(...))"
        ) from error


def spec_of(values: np.ndarray) -> tf.TensorSpec:
    """Returns the specification of the tensor of an array; raises a `TypeError` if it has none."""
    return tf.TensorSpec(values.shape, tf.string if values.dtype.kind in "OUST" else values.dtype)


def as_native(values: np.ndarray) -> np.ndarray:
    """Returns values that TensorFlow can take: strings as bytes, numbers in native byte order."""
    return string_bytes(values.astype(values.dtype.newbyteorder("="), copy=False))


def as_spec(values: np.ndarray, spec: tf.TensorSpec) -> np.ndarray:
    """Returns values that TensorFlow can take, in the data type of the first sample."""
    values = as_native(values)
    if (spec.dtype == tf.string) != (values.dtype == object):
        raise TypeError(f"got {values.dtype} instead of {spec.dtype.name}")
    if spec.dtype == tf.string:
        return values
    return values.astype(spec.dtype.as_numpy_dtype, casting="same_kind", copy=False)


def string_bytes(values: np.ndarray) -> np.ndarray:
    """Encodes strings and paths as bytes; leaves numbers as they are."""
    if values.dtype.kind not in "OUST":
        return values
    encoded = np.empty(values.shape, object)
    encoded.flat = [v if isinstance(v, bytes) else os.fsencode(v) for v in values.flat]
    return encoded


def _missing(name: str) -> ValueError:
    return ValueError(f"{name} has missing values: fill them in first, as by fillna(...)")


def _kind(array: Any) -> type[Any]:
    if isinstance(array, tf.SparseTensor) or type(array).__module__.startswith("scipy.sparse"):
        return SparseColumn
    if isinstance(array, (tf.Tensor, tf.RaggedTensor)):
        return TensorColumn
    return FrameColumn if hasattr(array, "iloc") else HostColumn


def _is_indexed_array(array: Any) -> bool:
    """Returns whether an array can be indexed by rows, without reading it whole."""
    return isinstance(getattr(array, "dtype", None), np.dtype) and hasattr(array, "shape")


def _is_text(value: object) -> bool:
    return isinstance(value, (str, bytes, os.PathLike))


def _as_coo(array: Any) -> tf.SparseTensor:
    """Converts a SciPy matrix."""
    if isinstance(array, tf.SparseTensor):
        return array
    coo = array.tocoo()
    return tf.SparseTensor(np.stack([coo.row, coo.col], 1).astype(np.int64), coo.data, coo.shape)
