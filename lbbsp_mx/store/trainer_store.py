"""Parameters and sums of gradients of a gluon trainer: `TrainerStore`."""

from __future__ import annotations

from collections.abc import Hashable

from lbbsp_mx.fence import wait_for
from lbbsp_mx.store.collectives import Arrays, StoreCollectives, share_of
from lbbsp_mx.store.kvstore import SharedStore
from lbbsp_mx.store.native import runtime


class TrainerStore(StoreCollectives):
    """Store of one of several trainers: broadcasts parameters, and sums gradients over all.

    A single worker has one too, which is not used: gluon creates its store.
    """

    def __init__(self, store: SharedStore) -> None:
        super().__init__(store.native, store.waiting)
        if store.distributed:
            runtime().require_exact_sums("the trainer")
        self.type = store.type  # which gluon reads

    def broadcast(self, key: Hashable, value: Arrays, out: Arrays, priority: int = 0) -> None:
        """Sends the value of worker 0 to all workers; a collective.

        A key can be sent again. Waits until the values have arrived.
        """
        # The lock must not be held for long: the value may depend on a layer that gathers, or be
        # queued behind one that does, because operators share memory.
        with self.waiting("for the values of the parameters"):
            wait_for((value, out))
        self.barrier()
        with self._meeting("for the parameters of worker 0"):
            if key in self._keys:  # which MXNet introduces once: the others add zeros to the value
                self.pushpull(key, share_of(value, self.rank), out)
            else:
                with runtime().lock:
                    self._native.broadcast(self._key(key), value, out, priority)
            # MXNet orders operations by array, not by key: a gradient could overtake the parameter.
            wait_for(out)

    def pushpull(
        self, key: Hashable, value: Arrays, out: Arrays | None = None, priority: int = 0
    ) -> None:
        """Sums the values over devices and workers, in place if `out` is None."""
        with runtime().lock:
            self._native.pushpull(self._key(key), value, out=out, priority=priority)
