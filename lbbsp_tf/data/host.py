"""Python functions that the graphs of `tf.data` call, released with the data set."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

HostFunction = Callable[..., Sequence[np.ndarray]]


class HostCalls:
    """Calls of Python functions, which live as long as this object.

    TensorFlow keeps the function of a `tf.numpy_function` in the default graph until the process
    ends, with all data that it refers to. It gets a weak reference here.
    """

    def __init__(self) -> None:
        self._functions: list[HostFunction] = []

    def call(
        self, function: HostFunction, inputs: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
    ) -> list[tf.Tensor]:
        """Calls a function of arrays from the graph, or at once."""
        if tf.executing_eagerly():
            arrays = function(*(tensor.numpy() for tensor in inputs))
            return [tf.constant(v, spec.dtype) for v, spec in zip(arrays, specs, strict=True)]
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
