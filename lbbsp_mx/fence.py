"""Waits for the current values of arrays: `wait_for`; whatever is queued later: `Fence`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mxnet as mx


class Fence:
    """Waits until the operations that are queued on some arrays now have finished.

    MXNet can only wait for an array's *last* queued write. For a gradient this is the sum over
    workers, which is queued before the gradient has been computed. A fence therefore queues a copy
    of one element of each array and waits for the copies. One operator copies from all arrays of
    the same device and dtype, because a call costs as much as copying many elements.

    Example::

        computed = fence.record(gradients)
        ...                        # queue further operations on the gradients
        computed()                 # waits until the gradients have been computed
    """

    def __init__(self) -> None:
        self._arrays: list[mx.nd.NDArray] = []
        self._copies: list[tuple[mx.nd.CachedOp, list[mx.nd.NDArray]]] = []

    def record(self, arrays: Sequence[mx.nd.NDArray]) -> Callable[[], None]:
        """Returns a function that waits for the current values of the arrays.

        It must be called before the next call of `record`, which reuses the copies.
        """
        if list(map(id, arrays)) != list(map(id, self._arrays)):
            self._arrays = list(arrays)  # keeps them alive, so that their ids stay unique
            kinds: dict[object, list[mx.nd.NDArray]] = defaultdict(list)
            for array in arrays:  # an operator takes arrays of one device and dtype only
                kinds[array.context, array.dtype].append(array)
            self._copies = [(_first_elements(kind), kind) for kind in kinds.values()]
        return partial(wait_for, [copy(*kind) for copy, kind in self._copies])


def _first_elements(arrays: Sequence[mx.nd.NDArray]) -> mx.nd.CachedOp:
    """Creates an operator that stacks the first elements of arrays like these.

    It takes none of the memory that operators share, as a sum would: MXNet would let all others
    that need some wait until these arrays are computed.
    """
    firsts = [
        mx.sym.slice(mx.sym.var(f"array{i}"), begin=(0,) * array.ndim, end=(1,) * array.ndim)
        for i, array in enumerate(arrays)
    ]
    elements = mx.sym.stack(*[mx.sym.reshape(first, shape=(1,)) for first in firsts])
    return mx.nd.CachedOp(elements, [("static_alloc", True), ("static_shape", True)])


def first_element(array: mx.nd.NDArray) -> mx.nd.NDArray:
    """Queues a copy of one element, which is complete when the array has its current value."""
    array = array.as_nd_ndarray()
    return array.slice(begin=(0,) * array.ndim, end=(1,) * array.ndim)


def arrays_in(values: Any) -> Iterator[mx.nd.NDArray]:
    """Yields the arrays in a nested list."""
    if hasattr(values, "wait_to_read"):
        yield values
    else:
        for each in values:
            yield from arrays_in(each)


def wait_for(values: Any) -> None:
    """Waits for the arrays in a nested list, with all that is queued on them."""
    for array in arrays_in(values):
        array.wait_to_read()
