"""Waiting for the present values of arrays that something else is about to change: `Fence`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import mxnet as mx

Array = mx.nd.NDArray


class Fence:
    """Records arrays as they are queued to be now, and waits for that, whatever follows.

    MXNet waits for an array's *last* write, and a gradient's is its sum over workers, which is
    queued before it is computed. So one element of each is copied; by one call for all arrays of
    a kind, since a call costs as much as the copy of many elements.

    Example::

        computed = fence.record(gradients)
        ...                        # queue more on the gradients
        computed()                 # waits until they had been computed
    """

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._copies: list[tuple[mx.nd.CachedOp, list[Array]]] = []

    def record(self, arrays: Sequence[Array]) -> Callable[[], None]:
        """Returns what waits for the present values of the arrays; before the next call."""
        if list(map(id, arrays)) != list(map(id, self._arrays)):
            self._arrays = list(arrays)  # which keeps their ids from being given to others
            self._copies = [(_first_elements(kind), kind) for kind in _by_kind(arrays)]
        return partial(_wait, [copy(*kind) for copy, kind in self._copies])


def _by_kind(arrays: Sequence[Array]) -> list[list[Array]]:
    """Groups the arrays that one operator can take."""
    kinds: dict[object, list[Array]] = defaultdict(list)
    for array in arrays:
        kinds[array.context, array.dtype].append(array)
    return list(kinds.values())


def _first_elements(arrays: Sequence[Array]) -> mx.nd.CachedOp:
    """Makes an operator on such arrays whose result is the sum of their first elements."""
    firsts = [
        mx.sym.slice(mx.sym.var(f"array{i}"), begin=(0,) * array.ndim, end=(1,) * array.ndim)
        for i, array in enumerate(arrays)
    ]
    total = mx.sym.add_n(*[mx.sym.reshape(first, shape=(1,)) for first in firsts])
    return mx.nd.CachedOp(total, [("static_alloc", True), ("static_shape", True)])


def _wait(arrays: list[Array]) -> None:
    for array in arrays:
        array.wait_to_read()
