"""What all stores of this process share: the one native store, its end, and bounded waiting."""

from __future__ import annotations

import atexit
import itertools
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache

import mxnet as mx

from lbbsp_core.runtime.exit import end_now, fail_fast
from lbbsp_core.runtime.liveness import Watchdog
from lbbsp_mx import cluster

DISTRIBUTED = ("dist_sync", "dist_device_sync")
IN_ONE_PROCESS = ("local", "device")

LEAVE_SECONDS = 1800.0
"""How long a worker that is done waits for the others, which may still evaluate."""


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
        """Returns the native store of a kind; of the distributed ones there is only one.

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
                f"no cluster of {cluster.describe()} has come together within {start_seconds:g} s: "
                "start the scheduler, all servers and all workers, where they reach each other"
            )
            with self.watchdog.deadline(start_seconds, message):
                self._adopt(mx.kv.create(kind))
                self.distributed._barrier()
        if self.distributed.type != kind:
            raise ValueError(
                f"this process has a store {self.distributed.type!r} already, and MXNet can make "
                f"no second one: use it again instead of {kind!r}"
            )
        return self.distributed

    def waiting(
        self, rank: int, seconds: float, what: str, owner: str
    ) -> AbstractContextManager[None]:
        """Ends the process when the wait inside the context takes longer than `seconds`.

        Args:
            rank: Of this worker.
            seconds: Longest wait.
            what: Of the wait, to complete "has waited ...".
            owner: Class whose `wait_seconds` can be raised.
        """
        return self.watchdog.deadline(
            seconds,
            f"worker {rank} has waited {seconds:g} s {what}, and gives up: a worker or server did "
            f"not respond; if it only needs longer, raise wait_seconds of {owner}",
        )

    def _adopt(self, native: mx.kv.KVStore) -> None:
        if self.distributed is None:
            self.distributed = native
            fail_fast()
            atexit.register(self._leave, _exit_status())

    def _leave(self, status: Callable[[], int]) -> None:
        """Leaves the cluster: together with all workers, or at once where this one has failed.

        MXNet would do so when Python frees the store, which is too late: its threads still run
        when its library is unloaded, and abort the process.
        """
        if status():
            end_now(status())
        try:
            for ending in reversed(self.endings):
                ending()
        except BaseException:  # Python would only print it, and exit with 0
            traceback.print_exc()
            end_now(1)
        message = f"the other workers have not ended within {LEAVE_SECONDS:g} s: this one gives up"
        with self.watchdog.deadline(LEAVE_SECONDS, message):
            mx.nd.waitall()
            self.distributed.__del__()
            self.distributed.handle = None  # it is freed: once only


@lru_cache(maxsize=1)
def runtime() -> Runtime:
    """Returns the one of this process."""
    return Runtime()


def _exit_status() -> Callable[[], int]:
    """Watches what the process is asked to exit with. Returns what reads it; 0 if it just ends.

    A worker that exits with an error must not wait in MXNet's exit barrier for peers that wait
    for its gradients, and Python does not say what status it is about to exit with.
    """
    exit_with, requested = sys.exit, [0]

    def exit_and_note(status: object = None) -> None:
        requested[0] = status if isinstance(status, int) else int(status is not None)
        exit_with(status)

    sys.exit = exit_and_note
    return lambda: requested[0]
