"""Gathers of a layer over all workers, also where it is used several times at once: `Peers`.

MXNet calls operators written in Python on threads of its own. It keeps the forward passes of one
layer in the order of the script, since they all write its running moments. Backward passes that do
not depend on each other run at the same time and in any order, which differs between workers.

All gathers of one kind share a key, on which the workers can only take turns: in each *turn* every
worker sends the row of whatever use is ready. A row therefore starts with the number of its use,
which is the same on all workers; who needs the rows of a use waits until every worker has sent
its own. The uses that are ready never depend on one that is not, so that no turn is missing.
"""

from __future__ import annotations

import copy
import itertools
import threading
import uuid
from collections import defaultdict, deque
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
from mxnet import gluon

from lbbsp_core.runtime.loop.pipelined import PipelinedSession
from lbbsp_mx import env
from lbbsp_mx.store.collectives import StoreCollectives

_USES: Final = 1 << 24
"""Numbers of uses are below this, so that float32 holds them exactly."""

_PEERS: WeakValueDictionary[str, Peers] = WeakValueDictionary()
"""Peers by key, because MXNet passes only text to an operator."""


def find_peers(key: str) -> Peers | None:
    """Returns the peers with a key; None if their layer is of another process, or was freed."""
    return _PEERS.get(key)


class Peers:
    """The other workers, as a layer that normalises over all of them sees them.

    Layers that share their parameters share one. By the parameter `running_mean` the trainer
    recognises such a layer.
    """

    def __init__(self, running_mean: gluon.Parameter) -> None:
        self._running_mean = running_mean
        self.key = uuid.uuid4().hex  # names of layers are not unique
        self._uses = itertools.count()
        self._turns: dict[str, _Turns] | None = None  # empty if there are no other workers
        _PEERS[self.key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        """Returns unconnected peers, for a copy of the network."""
        return Peers(copy.deepcopy(self._running_mean, memo))

    @property
    def is_connected(self) -> bool:
        """True once a trainer has connected the layer."""
        return self._turns is not None

    def connect(
        self,
        store: StoreCollectives,
        session: PipelinedSession,
        devices: int,
        mean_loss: bool,
        accumulate: int,
    ) -> None:
        """Connects the layer to the other workers, if there are any; the trainer calls it."""
        refused = {
            f"one device per worker, got {devices}: start more workers": devices > 1,
            "the loss per sample, got mean_loss=True: do not average the loss, since the trainer "
            "divides by the global batch size": mean_loss,
            f"accumulate = 1, got {accumulate}: leave it out, since the layer would normalise "
            "parts of the global batch, which depend on the plan": accumulate > 1,
        }
        for needs, is_refused in refused.items():
            if is_refused:
                raise ValueError(f"SyncBatchNorm needs {needs}")
        turns = {}
        if store.workers > 1:
            env.allow_many_custom_operators()
            channels = self._running_mean.shape[0]
            floats = np.dtype(self._running_mean.dtype).itemsize // np.float32().itemsize or 1
            for kind, width in (("moments", 2 * channels + 1), ("sums", 2 * channels)):
                turns[kind] = _Turns(store, session, width * floats)
        self._turns, self._uses = turns, itertools.count()

    def next_use(self) -> int:
        """Returns the number of the next use, the same on all workers."""
        return next(self._uses) % _USES

    def gather(self, kind: str, use: int, row: Any) -> Any:
        """Gathers the rows of all workers for a use, shape ``(workers, len(row))``.

        The kind is "moments" or "sums". The row is float32, or float64 if the parameters are.
        """
        turns = (self._turns or {}).get(kind)
        if turns is None:
            return row[None]
        if row.dtype != np.float64:
            return turns.gather(use, row)
        rounded = row.astype(np.float32)  # stores gather float32
        rows = turns.gather(use, np.concatenate([rounded, row - rounded])).astype(np.float64)
        return rows[:, : len(row)] + rows[:, len(row) :]


class _Turns:
    """Gathers on one key, in which the workers send rows of any uses."""

    def __init__(self, store: StoreCollectives, session: PipelinedSession, width: int) -> None:
        self._store, self._session = store, session
        self._slot = object()  # no other layer has it, also none that is created later
        self._turn, self._arrived = threading.Lock(), threading.Condition()
        self._rows: dict[int, list[deque[Any]]] = defaultdict(
            lambda: [deque() for _ in range(store.workers)]
        )
        # All workers create the key here, in the same order: later gathers run on MXNet's threads.
        store.begin_gather(np.zeros(1 + width, np.float32), slot=self._slot)()

    def gather(self, use: int, row: Any) -> Any:
        """Sends the row of a use, and waits for those of all workers."""
        with self._session.excluded_wait(), self._store.waiting("for a layer of the others"):
            sent = np.concatenate([[use], row]).astype(np.float32)
            with self._turn:
                received = self._store.begin_gather(sent, slot=self._slot)()
            with self._arrived:
                for rank, each in enumerate(received):
                    self._rows[int(each[0])][rank].append(each[1:])
                self._arrived.notify_all()
                self._arrived.wait_for(lambda: all(self._rows[use]))
                rows = np.stack([each.popleft() for each in self._rows[use]])
                if not any(self._rows[use]):
                    del self._rows[use]
                return rows
