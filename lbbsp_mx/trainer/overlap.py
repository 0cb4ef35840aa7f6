"""Waits for gradients and for their sums, part by part of a network: `PartFences`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Final

import mxnet as mx
import numpy as np

from lbbsp_core.measure import OverlapTimer
from lbbsp_core.runtime.exchange.buckets import in_buckets
from lbbsp_core.runtime.reliability.liveness import BackgroundThread
from lbbsp_mx.fence import Fence, first_element, wait_for
from lbbsp_mx.parameters import Arrays

_PARTS: Final = 4
_SMALLEST: Final = 1 << 20  # bytes of a part, beside which further calls of MXNet take no time


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
        self, gradients: Mapping[int, Arrays], send: Callable[[], None]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Calls `send`, which queues the sums of gradients, by number.

        Returns functions that wait for the gradients, which is called first, and for the sums.
        Those that are not dense are left out.
        """
        dense = {n: each for n, each in gradients.items() if each[0].stype == "default"}
        shapes = tuple((n, each[0].shape) for n, each in dense.items())
        if shapes != self._shapes:
            self._shapes = shapes
            self._parts = [(part, (Fence(), Fence())) for part in _parts_of(dense)]
        parts = [([a for n in part for a in dense[n]], *fences) for part, fences in self._parts]
        own = [fence.record(arrays) for arrays, fence, _ in parts]
        send()
        # Copies of their own: MXNet would run the operators of fences one after the other.
        timer = self.timer
        early = [first_element(arrays[-1]) for arrays, *_ in parts[:-1]] if timer else []
        sums = [fence.record(arrays) for arrays, _, fence in parts]
        observed: list[Future[None]] = []

        def computed() -> None:
            for wait, total in zip_longest(own, early):
                wait()  # here only: MXNet tells one thread of an error
                if timer is not None and total is not None:
                    timer.begin()
                    observed.append(_thread().start(partial(_arrive, total, timer)))

        def summed() -> None:
            for wait in (*sums, *(each.result for each in observed)):
                wait()

        return computed, summed


def _arrive(total: mx.nd.NDArray, timer: OverlapTimer) -> None:
    """Waits for the last sum of a part, which stands for all of them."""
    wait_for(total)
    timer.end()


def _parts_of(gradients: Mapping[int, Arrays]) -> list[list[int]]:
    arrays = [each[0] for each in gradients.values()]
    sizes = [array.size * np.dtype(array.dtype).itemsize for array in arrays]
    numbers = list(gradients)
    parts = in_buckets(sizes, max(sum(sizes) // _PARTS, _SMALLEST))
    return [[numbers[place] for place in part] for part in parts if part]


@lru_cache(maxsize=1)
def _thread() -> BackgroundThread:
    return BackgroundThread("lbbsp-overlap")
