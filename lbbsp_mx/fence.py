"""Waits for the current values of arrays: `wait_for`; whatever is queued later: `Fence`.

`PartFences` wait for gradients and for their sums, part by part of a network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, Final

import mxnet as mx
import numpy as np

from lbbsp_core.measure import OverlapTimer
from lbbsp_core.runtime.exchange.buckets import in_buckets
from lbbsp_core.runtime.reliability.liveness import BackgroundThread

_PARTS: Final = 4
_SMALLEST: Final = 1 << 20  # bytes of a part, beside which further calls of MXNet take no time


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
        for part in values:
            yield from arrays_in(part)


def wait_for(values: Any) -> None:
    """Waits for the arrays in a nested list, with all that is queued on them."""
    for array in arrays_in(values):
        array.wait_to_read()


class PartFences:
    """Fences for the gradients of a step, and for their sums, which are computed in place.

    A sum is written only when the fence has read its gradient. One fence for all would so keep the
    first sums waiting for the last gradient; the parts are those in which the backward pass
    computes the gradients. Those of at most 1 MiB are one part.

    Attributes:
        timer: Timer of the sums that travel while this worker computes; None: they are not timed.
    """

    def __init__(self) -> None:
        self.timer: OverlapTimer | None = None
        self._shapes: tuple[Hashable, ...] = ()
        self._parts: list[tuple[list[int], tuple[Fence, Fence]]] = []

    def record(
        self, gradients: Mapping[int, list[mx.nd.NDArray]], send: Callable[[], None]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Calls `send`, which queues the sums of gradients, by number.

        Returns functions that wait for the gradients, which is called first, and for the sums.
        Those that are not dense are left out.
        """
        dense = {n: gradient for n, gradient in gradients.items() if gradient[0].stype == "default"}
        shapes = tuple((n, gradient[0].shape) for n, gradient in dense.items())
        if shapes != self._shapes:
            self._shapes = shapes
            self._parts = [(part, (Fence(), Fence())) for part in _parts_of(dense)]
        parts = [([a for n in part for a in dense[n]], *fences) for part, fences in self._parts]
        waits = [fence.record(arrays) for arrays, fence, _ in parts]
        send()
        # Copies of their own: MXNet would run the operators of fences one after the other.
        timer = self.timer
        early = [first_element(arrays[-1]) for arrays, *_ in parts[:-1]] if timer else []
        sums = [fence.record(arrays) for arrays, _, fence in parts]
        observed: list[Future[None]] = []

        def computed() -> None:
            for wait, total in zip_longest(waits, early):
                wait()  # here only: MXNet tells one thread of an error
                if timer is not None and total is not None:
                    timer.begin()
                    observed.append(_thread().start(partial(_arrive, total, timer)))

        def summed() -> None:
            for wait in (*sums, *(future.result for future in observed)):
                wait()

        return computed, summed


def _arrive(total: mx.nd.NDArray, timer: OverlapTimer) -> None:
    """Waits for the last sum of a part, which stands for all of them."""
    wait_for(total)
    timer.end()


def _parts_of(gradients: Mapping[int, list[mx.nd.NDArray]]) -> list[list[int]]:
    arrays = [gradient[0] for gradient in gradients.values()]
    sizes = [array.size * np.dtype(array.dtype).itemsize for array in arrays]
    numbers = list(gradients)
    parts = in_buckets(sizes, max(sum(sizes) // _PARTS, _SMALLEST))
    return [[numbers[place] for place in part] for part in parts if part]


@lru_cache(maxsize=1)
def _thread() -> BackgroundThread:
    return BackgroundThread("lbbsp-overlap")
