"""Knowing when arrays are there that something else is about to change: `Fence`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mxnet as mx


class Fence:
    """Notes arrays as they are queued to be now, and waits for that, whatever follows.

    MXNet waits for an array's *last* write, and a gradient's is its sum over workers, which is
    queued before it is computed. So one element of each is copied; by one call for all arrays of
    a kind, since a call costs as much as the copy of many elements.

    Example::

        computed = ready.note(gradients)
        ...                        # queue more on the gradients
        computed()                 # waits until they had been computed
    """

    def __init__(self) -> None:
        self._arrays: list[Any] = []
        self._copies: list[tuple[Any, list[Any]]] = []

    def note(self, arrays: Sequence[Any]) -> Callable[[], None]:
        """Returns what waits for the arrays' values of now; before the next call."""
        if list(map(id, arrays)) != list(map(id, self._arrays)):
            self._arrays = list(arrays)  # which keeps their ids from being given to others
            self._copies = [(_first_elements(kind), kind) for kind in _kinds(arrays)]
        return partial(_wait, [copy(*kind) for copy, kind in self._copies])


def _kinds(arrays: Sequence[Any]) -> list[list[Any]]:
    """The arrays that one operator can take, together."""
    kinds: dict[Any, list[Any]] = defaultdict(list)
    for array in arrays:
        kinds[array.context, array.dtype].append(array)
    return list(kinds.values())


def _first_elements(arrays: Sequence[Any]) -> Any:
    """An operator on arrays such as these, with the sum of their first elements as its result."""
    firsts = [
        mx.sym.slice(mx.sym.var(f"array{i}"), begin=(0,) * array.ndim, end=(1,) * array.ndim)
        for i, array in enumerate(arrays)
    ]
    total = mx.sym.add_n(*[mx.sym.reshape(first, shape=(1,)) for first in firsts])
    return mx.nd.CachedOp(total, [("static_alloc", True), ("static_shape", True)])


def _wait(arrays: list[Any]) -> None:
    """MXNet computes behind our back: time is known once the values are there."""
    for array in arrays:
        array.wait_to_read()
