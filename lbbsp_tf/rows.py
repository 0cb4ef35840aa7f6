"""Rows of a batch: dense, ragged and sparse tensors, whose first axis is that of samples."""

from __future__ import annotations

from typing import TypeAlias

import keras
import tensorflow as tf

Batch: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor"


def first_leaf(batch: object) -> Batch:
    """Returns the first tensor of a nest."""
    return next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None)


def count_rows(tensor: Batch) -> tf.Tensor:
    """Returns the number of rows, an int64 scalar."""
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.nrows(tf.int64)
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    return tf.shape(tensor, tf.int64)[0]


def slice_rows(tensor: Batch, begin: tf.Tensor, end: tf.Tensor) -> Batch:
    """Returns the rows ``begin .. end - 1``."""
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[begin:end]
    row_shape = tensor.dense_shape[1:]
    start = tf.concat([[begin], tf.zeros_like(row_shape)], 0)
    return tf.sparse.slice(tensor, start, tf.concat([[end - begin], row_shape], 0))


def concatenate_rows(*tensors: Batch) -> Batch:
    """Returns the rows of several tensors of one kind."""
    if isinstance(tensors[0], tf.SparseTensor):
        return tf.sparse.concat(0, tensors)
    return tf.concat(tensors, 0)
