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
        self._functions.append(function)
        weak = _Weak(weakref.ref(self), len(self._functions) - 1)
        tensors = tf.numpy_function(weak, inputs, [spec.dtype for spec in specs])
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape(spec.shape)
        return tensors

    def run(self, number: int, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Runs the function with a number, which a graph has called."""
        return self._functions[number](*arrays)


class _Weak:
    """Function of a `HostCalls` that does not keep it alive."""

    def __init__(self, calls: weakref.ref[HostCalls], number: int) -> None:
        self._calls, self._number = calls, number

    def __call__(self, *arrays: np.ndarray) -> Sequence[np.ndarray]:
        calls = self._calls()
        if calls is None:
            raise RuntimeError("the data set is read after its balancer and pipeline were deleted")
        return calls.run(self._number, arrays)
