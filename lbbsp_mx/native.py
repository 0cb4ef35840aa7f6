"""What all stores of this process share: the one native store, its end, and bounded waiting."""

from __future__ import annotations

import atexit
import itertools
import sys
import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mxnet as mx

from lbbsp_core.runtime.exit import end_now, fail_fast
from lbbsp_core.runtime.liveness import Watchdog
from lbbsp_mx import cluster

DISTRIBUTED = ("dist_sync", "dist_device_sync")
IN_ONE_PROCESS = ("local", "device")

LEAVE_SECONDS = 1800.0
"""How long a worker that is done waits for the others, who may still evaluate."""


class Process:
    """What all stores of this process share."""

    def __init__(self) -> None:
        self.watch = Watchdog()
        self.numbers = itertools.count()
        self.distributed: Any = None
        self.endings: list[Callable[[], None]] = []
        """What is still to be done before this process leaves the cluster in peace."""
        self.serves_optimizer = False

    def native(self, kind: str | mx.kv.KVStore, start_seconds: float) -> Any:
        """The native store of a kind; of the distributed ones there is only one."""
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
            with self.watch.waiting(start_seconds, message):
                self._adopt(mx.kv.create(kind))
                self.distributed._barrier()
        if self.distributed.type != kind:
            raise ValueError(
                f"this process has a store {self.distributed.type!r} already, and MXNet can make "
                f"no second one: use it again instead of {kind!r}"
            )
        return self.distributed

    def _adopt(self, native: Any) -> None:
        if self.distributed is None:
            self.distributed = native
            fail_fast()
            atexit.register(self._leave, _exit_status())

    def _leave(self, status: Callable[[], int]) -> None:
        """The end: together with all workers, or at once where this one has failed.

        MXNet would do so when Python frees the store, which is too late: its threads are still
        running when its library is unloaded, and abort the process.
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
        with self.watch.waiting(LEAVE_SECONDS, message):
            mx.nd.waitall()
            self.distributed.__del__()
            self.distributed.handle = None  # it is freed: once only


@lru_cache(maxsize=1)
def process() -> Process:
    """This one."""
    return Process()


def _exit_status() -> Callable[[], int]:
    """Notes what the process is asked to exit with; 0 if it just ends.

    A worker that wishes to exit with an error must not wait in MXNet's exit barrier for peers
    that wait for its gradients, and Python tells nobody what status it is about to exit with.
    """
    exit_with, wished = sys.exit, [0]

    def noting_exit(status: Any = None) -> None:
        wished[0] = status if isinstance(status, int) else int(status is not None)
        exit_with(status)

    sys.exit = noting_exit
    return lambda: wished[0]
