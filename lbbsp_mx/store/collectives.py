"""Small exact all-gathers over a store, and the sums of a trainer, on keys of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import mxnet as mx
import numpy as np

from lbbsp_core.runtime.exchange.protocol import Row, pack, unpack
from lbbsp_core.runtime.loop.pipelined import Rows
from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_mx.fence import arrays_in
from lbbsp_mx.store.native import runtime
from lbbsp_mx.store.script_keys import LARGEST_KEY

Arrays: TypeAlias = "mx.nd.NDArray | Sequence[mx.nd.NDArray]"
"""One array per device: gluon passes a single array or a list."""

_FEW = 64
"""Width up to which gathered rows are not padded to a power of two."""


def share_of(values: Arrays, rank: int) -> mx.nd.NDArray:
    """Returns a worker's share of a sum that is the value of worker 0."""
    share = next(arrays_in(values)).copy()  # of values on several devices the first one counts
    if rank > 0:  # not a product with 0, which is NaN where the value is
        share[:] = 0
    return share


class StoreCollectives:
    """All-gathers of integers and rows over a native store.

    Its keys are numbered by first use, which must have the same order on all workers. `waiting`
    bounds a wait, by what it is for.
    """

    def __init__(
        self, native: mx.kv.KVStore, waiting: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._native, self.waiting = native, waiting
        self._keys: dict[Hashable, int] = {}
        # Read once, because MXNet asks its library each time.
        self.rank: int = native.rank
        self.workers: int = native.num_workers
        self._is_distributed = native.type.startswith("dist")

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Gathers integers in [0, 2^48) from all workers, which must all call it, by rank."""
        packed = pack(values)
        # Every width occupies a key of its own on the servers, for good.
        width = len(packed) if len(packed) <= _FEW else 1 << (len(packed) - 1).bit_length()
        rows = self.begin_gather(np.pad(packed, (0, width - len(packed))), slot=0)
        with self._meeting("for the other workers"):
            return [unpack(row[: len(packed)]) for row in rows()]

    def begin_gather(
        self, row: Row | Sequence[float], *, slot: Hashable, priority: int = 0
    ) -> Callable[[], Rows]:
        """Starts to gather a row of float32 from every worker, and returns at once.

        Wait for the rows before the next gather on the same slot, because MXNet does not keep two
        sums on one key in order. Gathers of higher priority are sent first.
        """
        slots = np.zeros((self.workers, len(row)), np.float32)
        slots[self.rank] = row
        if self.workers == 1:
            return lambda: slots
        array = mx.nd.from_numpy(slots)  # shares the memory: `array` would copy, which takes 0.1 ms
        key = self._gather_key(slot, len(row))
        with runtime().lock:
            self._native.pushpull(key, array, priority=priority)
        received: Callable[[], Rows] = array.asnumpy
        return received

    def barrier(self) -> None:
        """Waits until all workers have reached this call."""
        if self._is_distributed:
            with self._meeting("at a barrier"):
                self._native._barrier()

    @contextmanager
    def _meeting(self, reason: str) -> Iterator[None]:
        """Bounds the time inside the context, and notes that this worker waits for the others."""
        with self.waiting(reason), runtime().activity.during(Activity.MEETING):
            yield

    def _key(self, key: Hashable) -> int:
        """Returns the native key, numbered by first use, in the same order on all workers."""
        if key not in self._keys:
            number = next(runtime().numbers)
            if number > LARGEST_KEY:
                raise ValueError(
                    f"a process can have keys up to {LARGEST_KEY} in its stores, and all are "
                    "taken: create stores and trainers once, not in a loop"
                )
            self._keys[key] = number
        return self._keys[key]

    def _gather_key(self, slot: Hashable, width: int) -> int:
        """Returns the native key of a gather; its first use initialises it on the servers."""
        key = ("gather", slot, width)
        if key not in self._keys:
            self.barrier()  # the lock must not be held for long
            with self._meeting("for the other workers"), runtime().lock:
                self._native.init(self._key(key), mx.nd.zeros((self.workers, width)))
        return self._keys[key]
