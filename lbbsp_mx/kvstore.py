"""Aggregate: sums of gradients over workers by one native store, and small all-gathers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import mxnet as mx
import numpy as np
from mxnet.kvstore import KVStoreBase

from lbbsp_core.runtime.activity import Activity
from lbbsp_core.runtime.pipelined import Rows
from lbbsp_core.runtime.protocol import Row, pack, unpack
from lbbsp_mx import cluster
from lbbsp_mx.native import ALIASES, DISTRIBUTED, IN_ONE_PROCESS, runtime

Arrays: TypeAlias = "mx.nd.NDArray | Sequence[mx.nd.NDArray]"
"""One array per device: gluon passes a single array or a list."""

KINDS = (*DISTRIBUTED, *IN_ONE_PROCESS)
NAME = "dist_lbbsp"
"""Name in MXNet's registry: on one device, a gluon Trainer ignores stores without "dist" in it."""

_LARGEST_KEY = (2**31 - 1) // 9973
"""Largest key for which ``key * 9973`` fits in 32 bits: beyond it MXNet reads invalid memory."""

_FEW = 64
"""Width up to which gathered rows are not padded to a power of two."""


class KVStore(KVStoreBase):
    """Store for gluon that sums gradients over workers with unequal batches.

    It wraps a native store of MXNet, whose parameter servers compute the sums; the optimizer runs
    in the workers. It also performs small exact all-gathers, on separate keys. Several stores in
    one process share the native store, because MXNet hangs if a second one is created.

    Args:
        kind: "dist_sync" (or "dist") or "dist_device_sync" in a cluster, "local" or "device" in one
            process; or an existing native store of one of these kinds.
        start_seconds: Maximum seconds to wait until all processes of the cluster have started.
        wait_seconds: Maximum seconds that a step waits for the other workers or for a server.

    Raises:
        ValueError: The kind is unknown, or needs a cluster and no ``DMLC_*`` variable is set.

    Example::

        store = lbbsp_mx.KVStore("dist_sync")
        trainer = lbbsp_mx.Trainer(params, "sgd", kvstore=store, global_batch_size=256)
    """

    def __init__(
        self,
        kind: str | mx.kv.KVStore = "dist_sync",
        *,
        start_seconds: float = 120.0,
        wait_seconds: float = 1800.0,
    ) -> None:
        name = kind if isinstance(kind, str) else kind.type
        self._kind = ALIASES.get(name, name)
        if self._kind not in KINDS:
            raise ValueError(
                f"the store must be one of {', '.join(KINDS)}, got {self._kind!r}: choose "
                "dist_sync in a cluster, device in one process with several GPUs"
            )
        if self.distributed and not cluster.in_cluster():
            raise ValueError(
                f"{self._kind} needs a cluster, and no DMLC_* variable is set: start the script "
                "with `lbbsp launch --framework mxnet`, or use the store 'local'"
            )
        self._native = runtime().native(
            self._kind if isinstance(kind, str) else kind, start_seconds
        )
        self._lock = runtime().lock
        self._numbers = runtime().numbers
        self._keys: dict[Hashable, int] = {}
        self._rank, self._workers = self._native.rank, self._native.num_workers
        self._wait_seconds = wait_seconds
        self.weight = 1.0

    @property
    def distributed(self) -> bool:
        """True if the store sums over processes."""
        return self._kind in DISTRIBUTED

    @property
    def type(self) -> str:
        """Name of the store's type, which gluon reads."""
        return f"lbbsp_{self._kind}"

    @property
    def rank(self) -> int:
        """Number of this worker, in [0, workers)."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """Number of workers, N, under MXNet's name."""
        return self._workers

    @property
    def workers(self) -> int:
        """Number of workers, N."""
        return self._workers

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Returns False for optimizers, because a server would divide by a constant batch size.

        Raises:
            ValueError: The capability is unknown.
        """
        if capability.lower() == KVStoreBase.OPTIMIZER:
            return False
        raise ValueError(f"capability must be {KVStoreBase.OPTIMIZER!r}, got {capability!r}")

    def broadcast(self, key: int, value: Arrays, out: Arrays, priority: int = 0) -> None:
        """Sends the value of worker 0 to all workers, and waits for it; a collective."""
        self.barrier()  # the lock must not be held for long
        with self._meeting("for the parameters of worker 0"):
            with self._lock:
                self._native.broadcast(self._key(key), value, out, priority)
            # MXNet orders operations by array, not by key: a gradient could overtake the parameter.
            for each in _each(out):
                each.wait_to_read()

    def pushpull(
        self, key: int, value: Arrays, out: Arrays | None = None, priority: int = 0
    ) -> None:
        """Sums `weight` times the values over devices and workers, in place if `out` is None."""
        if self.weight != 1.0:
            for each in _each(value):
                each *= self.weight
        with self._lock:
            self._native.pushpull(self._key(key), value, out=out, priority=priority)

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

        Args:
            row: Row of this worker, shape ``(width,)``.
            slot: Selects a key. Wait for the rows before the next gather on the same slot, because
                MXNet does not keep two sums on one key in order.
            priority: Gathers of higher priority are sent first.

        Returns:
            A function that waits for the rows by rank, shape ``(workers, width)``.
        """
        slots = np.zeros((self._workers, len(row)), np.float32)
        slots[self._rank] = row
        if self._workers == 1:
            return lambda: slots
        array = mx.nd.from_numpy(slots)  # shares the memory: `array` would copy, which takes 0.1 ms
        key = self._gather_key(slot, len(row))
        with self._lock:
            self._native.pushpull(key, array, priority=priority)
        return array.asnumpy

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Ends the process if the wait inside the context takes too long."""
        return runtime().waiting(self._rank, self._wait_seconds, what, "lbbsp_mx.KVStore")

    def barrier(self) -> None:
        """Waits until all workers have reached this call."""
        if self.distributed:
            with self._meeting("at a barrier"):
                self._native._barrier()

    @contextmanager
    def _meeting(self, what: str) -> Iterator[None]:
        """Bounds the time inside the context, and notes that this worker waits for the others."""
        with self.waiting(what), runtime().activity.during(Activity.MEETING):
            yield

    def _key(self, key: Hashable) -> int:
        """Returns the native key, numbered by first use, in the same order on all workers."""
        if key not in self._keys:
            number = next(self._numbers)
            if number > _LARGEST_KEY:
                raise ValueError(
                    f"a process can have at most {_LARGEST_KEY} keys in its stores: create stores "
                    "and trainers once, not in a loop"
                )
            self._keys[key] = number
        return self._keys[key]

    def _gather_key(self, slot: Hashable, width: int) -> int:
        """Returns the native key of a gather; its first use initialises it on the servers."""
        key = ("gather", slot, width)
        if key not in self._keys:
            self.barrier()  # the lock must not be held for long
            with self._meeting("for the other workers"), self._lock:
                self._native.init(self._key(key), mx.nd.zeros((self._workers, width)))
        return self._keys[key]


def _each(arrays: Arrays) -> Sequence[mx.nd.NDArray]:
    """Returns the arrays as a sequence, one per device."""
    return arrays if isinstance(arrays, list | tuple) else [arrays]


KVStoreBase.kv_registry[NAME] = KVStore


def make_store(kvstore: KVStore | mx.kv.KVStore | str | None) -> KVStore:
    """Returns the `KVStore` for the argument `kvstore` of a Trainer.

    Raises:
        ValueError: The argument is not a store, or its kind is not supported.
    """
    if isinstance(kvstore, KVStore):
        return kvstore
    if kvstore is None:
        return KVStore("local")
    if isinstance(kvstore, mx.kv.KVStore):
        return KVStore(kvstore)
    if kvstore == NAME:
        return KVStore()
    if isinstance(kvstore, str):
        return KVStore(kvstore)
    raise ValueError(
        f"kvstore must be an lbbsp_mx.KVStore or one of {', '.join(KINDS)}, got {kvstore!r}"
    )
