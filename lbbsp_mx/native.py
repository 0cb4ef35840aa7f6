"""State that all stores of this process share: the native store, its shutdown, time limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache

import mxnet as mx

from lbbsp_core.runtime.exit import fail_fast, on_exit
from lbbsp_core.runtime.liveness import Watchdog
from lbbsp_mx import cluster

DISTRIBUTED = ("dist_sync", "dist_device_sync")
IN_ONE_PROCESS = ("local", "device")

LEAVE_SECONDS = 1800.0
"""Seconds that a finished worker waits for the others, which may still be evaluating."""


class Runtime:
    """State that all stores of a process share."""

    def __init__(self) -> None:
        self.watchdog = Watchdog()
        self.numbers = itertools.count()
        self.distributed: mx.kv.KVStore | None = None
        self.endings: list[Callable[[], None]] = []
        """Work that must be done before this process leaves the cluster."""
        self.serves_optimizer = False

    def native(self, kind: str | mx.kv.KVStore, start_seconds: float) -> mx.kv.KVStore:
        """Returns a native store; a process has only one distributed store.

        Args:
            kind: Kind of the store, or an existing native store.
            start_seconds: Maximum seconds to wait until all processes of the cluster have started.

        Raises:
            ValueError: The process has a distributed store of another kind.
        """
        if not isinstance(kind, str):
            if kind.type.startswith("dist"):
                self._adopt(kind)
            return kind
        if kind in IN_ONE_PROCESS:
            return mx.kv.create(kind)
        if self.distributed is None:
            message = (
                f"the cluster of {cluster.describe()} has not started within {start_seconds:g} s: "
                "start the scheduler, all servers and all workers, and check that they can connect "
                "to each other"
            )
            with self.watchdog.deadline(start_seconds, message):
                self._adopt(mx.kv.create(kind))
                self.distributed._barrier()
        if self.distributed.type != kind:
            raise ValueError(
                f"this process already has a store {self.distributed.type!r}, and MXNet cannot "
                f"create a second one: use the first one instead of {kind!r}"
            )
        return self.distributed

    def waiting(
        self, rank: int, seconds: float, what: str, owner: str
    ) -> AbstractContextManager[None]:
        """Ends the process if the wait inside the context takes longer than `seconds`.

        Args:
            rank: Rank of this worker.
            seconds: Maximum duration of the wait.
            what: What is waited for, to complete the message "has waited ...".
            owner: Name of the class whose `wait_seconds` is the limit.
        """
        return self.watchdog.deadline(
            seconds,
            f"worker {rank} has waited {seconds:g} s {what} and exits: a worker or server did not "
            f"respond; if it only needs more time, raise wait_seconds of {owner}",
        )

    def _adopt(self, native: mx.kv.KVStore) -> None:
        if self.distributed is None:
            self.distributed = native
            fail_fast()
            on_exit(self._leave)

    def _leave(self) -> None:
        """Leaves the cluster together with all workers.

        MXNet itself leaves when Python frees the store. This is too late: its threads still run
        when its library is unloaded, and abort the process.
        """
        for ending in reversed(self.endings):
            ending()
        message = f"the other workers have not finished within {LEAVE_SECONDS:g} s: exiting"
        with self.watchdog.deadline(LEAVE_SECONDS, message):
            mx.nd.waitall()
            self.distributed.__del__()
            self.distributed.handle = None  # freed: Python must not free it again


@lru_cache(maxsize=1)
def runtime() -> Runtime:
    """Returns the runtime of this process."""
    return Runtime()
