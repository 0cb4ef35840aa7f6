"""Source of arrays of all kinds, indexed by batch: one column for each, never copied whole."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lbbsp_core.order import Indices
from lbbsp_core.validate import require_fraction
from lbbsp_tf.compat import Array, Nest
from lbbsp_tf.data.source import Source, as_type, spec_of

_TEXT = (str, bytes, os.PathLike)
_SCALARS = (*_TEXT, int, float, bool, np.generic)


class Column(ABC):
    """Values of all samples along the first axis."""

    in_memory = True  # reading takes negligible time
    spec = tf.TensorSpec([None], tf.int64)  # of what `read` returns: by default numbers of samples

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = tuple(shape)

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, index: Indices) -> Array:
        """Returns what `pack` needs for the samples `index`."""
        return index

    @abstractmethod
    def pack(self, read: tf.Tensor) -> tf.Tensor:
        """Returns the values of what was read, as a tensor (or ragged or sparse tensor)."""

    def tail(self, start: int) -> Any:
        """Returns the values of the samples from `start` on, for validation."""
        return self.pack(tf.range(start, len(self), dtype=tf.int64))


class HostColumn(Column):
    """Column that Python reads: NumPy arrays, memory maps, HDF5 data sets, lists of strings."""

    def __init__(self, array: Any, name: str = "x") -> None:
        super().__init__(array.shape)
        self._array, self._name = array, name
        self.in_memory = isinstance(array, np.ndarray) and not isinstance(array, np.memmap)
        self._refuse_missing()
        self.spec = spec_of(self._rows(np.zeros(1, np.int64)))

    def read(self, index: Indices) -> Array:
        """Returns the values of the samples `index`."""
        try:
            return as_type(self._rows(index), self.spec.dtype)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self._name} cannot be read as {self.spec.dtype.name} at samples "
                f"{index[:8].tolist()}: fill in missing values, and convert all to one type "
                f"({error})"
            ) from error

    def pack(self, read: tf.Tensor) -> tf.Tensor:
        """Returns the values themselves."""
        return read

    def tail(self, start: int) -> Any:
        """Returns the values of the samples from `start` on."""
        values = self.read(np.arange(start, len(self)))
        return tf.constant(values) if values.dtype == object else values  # strings, for Keras

    def _refuse_missing(self) -> None:
        array = self._array
        is_objects = isinstance(array, np.ndarray) and array.dtype == object
        if is_objects and type(None) in set(map(type, array.flat)):
            raise _missing(self._name)

    def _rows(self, index: Indices) -> Array:
        if np.all(np.diff(index) == 1):
            return np.asarray(self._array[int(index[0]) : int(index[-1]) + 1])
        if isinstance(self._array, np.ndarray):
            return np.asarray(self._array[index])
        if type(self._array).__module__.startswith("h5py"):  # takes ascending indices only
            order = np.argsort(index)
            rows: Array = self._array[index[order]]
            return rows[np.argsort(order)]
        return np.stack([np.asarray(self._array[int(i)]) for i in index])


class FrameColumn(HostColumn):
    """Column of a pandas data frame, or of a series as ``(samples, 1)``, as Keras reads them."""

    def __init__(self, frame: Any, name: str = "x") -> None:
        super().__init__(frame.to_frame() if frame.ndim == 1 else frame, name)
        self.in_memory = True

    def _rows(self, index: Indices) -> Array:
        rows: Array = self._array.iloc[index].to_numpy()
        return rows

    def _refuse_missing(self) -> None:
        for position, (name, kind) in enumerate(self._array.dtypes.items()):
            is_number = isinstance(kind, np.dtype) and kind.kind != "O"
            if not is_number and self._array.iloc[:, position].isna().any():
                raise _missing(f"{self._name}[{name!r}]")


class TensorColumn(Column):
    """Column of a `tf.Tensor` or `tf.RaggedTensor`, kept in host memory."""

    def __init__(self, tensor: tf.Tensor | tf.RaggedTensor) -> None:
        super().__init__(tensor.shape)
        with tf.device("/CPU:0"):
            self._tensor = tf.nest.map_structure(tf.identity, tensor, expand_composites=True)

    def pack(self, read: tf.Tensor) -> tf.Tensor:
        """Returns the values of samples."""
        return tf.gather(self._tensor, read)


class SparseColumn(Column):
    """Column of a sparse matrix, of TensorFlow or SciPy."""

    def __init__(self, tensor: Any) -> None:
        if not isinstance(tensor, tf.SparseTensor):
            coo = tensor.tocoo()
            places = np.stack([coo.row, coo.col], 1).astype(np.int64)
            tensor = tf.SparseTensor(places, coo.data, coo.shape)
        super().__init__(tensor.shape)
        with tf.device("/CPU:0"):
            tensor = tf.sparse.reorder(tensor)
            rows, inner_places = tensor.indices[:, 0], tensor.indices[:, 1:]
            self._values, self._places = (
                tf.RaggedTensor.from_value_rowids(values, rows, len(self))
                for values in (tensor.values, inner_places)
            )

    def pack(self, read: tf.Tensor) -> tf.SparseTensor:
        """Returns the values of samples."""
        values, places = tf.gather(self._values, read), tf.gather(self._places, read)
        indices = tf.concat([values.value_rowids()[:, None], places.values], 1)
        shape = tf.concat([tf.shape(read, tf.int64), self.shape[1:]], 0)
        return tf.SparseTensor(indices, values.values, shape)


class Arrays(Source):
    """Source of in-memory arrays, memory maps, HDF5 data sets, data frames and tensors.

    Args:
        x: Array, or a nest (tuple, list, dict) of arrays, whose first axis is that of samples.
        y: Targets in the same form, or None.
        sample_weight: Array of shape ``(samples,)``, or None.
        validation_split: Fraction of the samples, the last ones, that are not trained on.
    """

    def __init__(
        self, x: Nest, y: Nest = None, sample_weight: Nest = None, validation_split: float = 0.0
    ) -> None:
        require_fraction("validation_split", validation_split)
        arguments = {"x": x, "y": y, "sample_weight": sample_weight}
        packed = [
            None if value is None else map_columns(name, value) for name, value in arguments.items()
        ]
        self.structure = keras.utils.pack_x_y_sample_weight(*packed)
        self._columns: list[Column] = tf.nest.flatten(self.structure)
        self.specs = [column.spec for column in self._columns]
        lengths = {len(column) for column in self._columns}
        if len(lengths) != 1:
            raise ValueError(
                "x, y and sample_weight must have the same number of samples, got shapes "
                f"{[column.shape for column in self._columns]}: a list of arrays is a list of "
                "inputs; for samples of different length pass tf.ragged.constant(...)"
            )
        (length,) = lengths
        self.in_memory = all(column.in_memory for column in self._columns)
        self.num_samples = int(length * (1.0 - validation_split))
        self.validation_samples = length - self.num_samples
        if not self.num_samples:
            raise ValueError(
                f"validation_split = {validation_split} of {length} samples leaves none for "
                "training: lower it"
            )

    @property
    def validation_data(self) -> Nest:
        """Samples that are not trained on, as ``(x, y)`` or ``(x, y, sample_weight)``; or None."""
        if not self.validation_samples:
            return None
        data = tf.nest.map_structure(lambda column: column.tail(self.num_samples), self.structure)
        return data if isinstance(data, tuple) else (data,)

    def rows(self, index: Indices) -> list[Array]:
        """Reads samples of each column."""
        return [column.read(index) for column in self._columns]

    def pack(self, tensors: Sequence[tf.Tensor]) -> Nest:
        """Returns the batch of what was read."""
        packed = [column.pack(read) for column, read in zip(self._columns, tensors, strict=True)]
        return tf.nest.pack_sequence_as(self.structure, packed)


def map_columns(name: str, value: Nest) -> Nest:
    """Makes a column of each array in a nest; lists of arrays become tuples."""
    if isinstance(value, Mapping):
        return {key: map_columns(f"{name}[{key!r}]", part) for key, part in value.items()}
    if isinstance(value, list) and value and all(isinstance(entry, _SCALARS) for entry in value):
        return _column(name, np.array(value, dtype=object if isinstance(value[0], _TEXT) else None))
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(entry, list) for entry in value):
            raise ValueError(
                f"{name} must be arrays, got a list of lists: pass np.asarray({name}), or "
                f"tf.ragged.constant({name}) if the lists have different lengths"
            )
        parts = [map_columns(f"{name}[{i}]", part) for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return _column(name, value)


def _column(name: str, array: Any) -> Column:
    """Makes a column of an array."""
    is_sparse = isinstance(array, tf.SparseTensor)
    is_sparse = is_sparse or type(array).__module__.startswith("scipy.sparse")
    is_tensor = isinstance(array, (tf.Tensor, tf.RaggedTensor))
    # What has rows and a type of NumPy is not read whole.
    has_rows = isinstance(getattr(array, "dtype", None), np.dtype) and hasattr(array, "shape")
    if not (is_sparse or is_tensor or has_rows or hasattr(array, "iloc")):
        array = np.asarray(array)
    if not len(array.shape):
        raise ValueError(
            "the data must be arrays whose first axis is that of samples, got "
            f"{name} = {array!r}: pass one array per input"
        )
    if not array.shape[0]:
        raise ValueError(f"{name} has no samples: its shape is {tuple(array.shape)}")
    try:
        if is_sparse or is_tensor:
            return (SparseColumn if is_sparse else TensorColumn)(array)
        return (FrameColumn if hasattr(array, "iloc") else HostColumn)(array, name)
    except TypeError as error:
        raise ValueError(
            f"{name} must be numbers or strings, got values of the "
            f"type {getattr(array, 'dtype', 'object')}: convert "
            "them first (for samples of different length, pass tf.ragged.constant(...))"
        ) from error


def _missing(name: str) -> ValueError:
    return ValueError(f"{name} has missing values: fill them in first, as by fillna(...)")
