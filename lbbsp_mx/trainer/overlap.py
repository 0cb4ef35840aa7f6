"""Waits for gradients and for their sums, part by part of a network: `PartFences`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache, partial
from typing import Final

import mxnet as mx
import numpy as np

from lbbsp_core.measure import OverlapTimer
from lbbsp_core.runtime.exchange.buckets import in_buckets
from lbbsp_core.runtime.reliability.liveness import BackgroundThread
from lbbsp_mx.fence import Fence, wait_for
from lbbsp_mx.parameters import Arrays

Wait = Callable[[], None]

_PARTS: Final = 4
_SMALLEST: Final = 1 << 20  # bytes of a part, beside which further calls of MXNet take no time


class PartFences:
    """Fences for the gradients of a step, and for their sums, which are computed in place.

    A sum is written only when the fence has read its gradient. One fence for all would so keep the
    first sums waiting for the last gradient; the parts are those in which the backward pass
    computes the gradients. Those of less than 2 MiB are one part.

    Attributes:
        timer: Timer of the sums that travel while this worker computes; None: they are not timed.
    """

    def __init__(self) -> None:
        self.timer: OverlapTimer | None = None
        self._shapes: tuple[Hashable, ...] = ()
        self._parts: list[tuple[list[int], Fence, Fence]] = []
        self._computed: list[Wait] = []

    def computed(self, gradients: Mapping[int, Arrays]) -> Wait:
        """Returns a function that waits for gradients, by number; call it before they are summed.

        Those that are not dense are left out.
        """
        dense = {n: each for n, each in gradients.items() if each[0].stype == "default"}
        shapes = tuple((n, each[0].shape) for n, each in dense.items())
        if shapes != self._shapes:
            self._shapes = shapes
            self._parts = [(part, Fence(), Fence()) for part in _parts_of(dense)]
        self._arrays = [[a for n in part for a in dense[n]] for part, _, _ in self._parts]
        fences = (fence for _, fence, _ in self._parts)
        self._computed = [f.record(a) for f, a in zip(fences, self._arrays, strict=True)]
        return partial(_wait_for_all, self._computed)

    def summed(self) -> Wait:
        """Returns a function that waits for the sums; call it when they are queued."""
        early = self._arrays[:-1] if self.timer else []
        # Copies of their own: MXNet would run the operators of fences one after the other.
        arrived = [partial(wait_for, _first_element(arrays[-1])) for arrays in early]
        fences = (fence for _, _, fence in self._parts)
        sums = [f.record(a) for f, a in zip(fences, self._arrays, strict=True)]
        if not arrived:
            return partial(_wait_for_all, sums)
        observed = _thread().start(partial(_observe, self.timer, self._computed, arrived))

        def wait() -> None:
            _wait_for_all(sums)
            observed.result()

        return wait


def _observe(timer: OverlapTimer, computed: list[Wait], arrived: list[Wait]) -> None:
    """Times parts from when their gradients have been computed to when their sums have arrived."""
    for wait_for_own, wait_for_sum in zip(computed, arrived, strict=False):  # not the last part
        wait_for_own()
        timer.begin()
        wait_for_sum()
        timer.end()


def _first_element(array: mx.nd.NDArray) -> mx.nd.NDArray:
    array = array.as_nd_ndarray()
    return array.slice(begin=(0,) * array.ndim, end=(1,) * array.ndim)


def _parts_of(gradients: Mapping[int, Arrays]) -> list[list[int]]:
    arrays = [each[0] for each in gradients.values()]
    sizes = [array.size * np.dtype(array.dtype).itemsize for array in arrays]
    numbers = list(gradients)
    parts = in_buckets(sizes, max(sum(sizes) // _PARTS, _SMALLEST))
    return [[numbers[place] for place in part] for part in parts if part]


def _wait_for_all(waits: list[Wait]) -> None:
    for wait in waits:
        wait()


@lru_cache(maxsize=1)
def _thread() -> BackgroundThread:
    return BackgroundThread("lbbsp-overlap")
