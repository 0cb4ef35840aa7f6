"""Small all-gathers of integers, for the handshake and the ends of epochs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from lbbsp_core.runtime.checkpoint.checkpoint import Arrays, Json
from lbbsp_core.runtime.exchange.collectives import Collectives
from lbbsp_core.runtime.exchange.handshake import Devices, Facts
from lbbsp_core.runtime.exchange.protocol import pack, unpack
from lbbsp_core.runtime.loop.session import WorkerSession
from lbbsp_core.runtime.options.options import SessionOptions
from lbbsp_core.runtime.reliability.activity import Activity, CurrentActivity
from lbbsp_tf import compat
from lbbsp_tf.activity import current_activity
from lbbsp_tf.cluster import rank_and_workers


class MirroredCollectives:
    """Collectives of a multi-worker strategy, which every process must call.

    The workers among which a batch is divided are the replicas. `rank` is the number of this
    process's first one.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        rank, processes = rank_and_workers(strategy.cluster_resolver)
        self._strategy, self.workers = strategy, strategy.num_replicas_in_sync
        self.local = self.workers // processes
        """Replicas of each process."""
        self.rank = rank * self.local
        rows = tf.TensorSpec([None, None], tf.float32)
        self._sum = tf.function(self._sum_over_workers, input_signature=[rows], autograph=False)

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Gathers integers in [0, 2^48) by rank; returns shape ``(workers, len(values))``.

        The values of a process are those of each of its replicas.
        """
        if not values:
            return [[] for _ in range(self.workers)]  # TensorFlow crashes in a sum of nothing
        slots = np.zeros((self.workers, 2 * len(values)), np.float32)
        slots[self.rank : self.rank + self.local] = pack(values)
        with compat.explained_by_variables():
            return [unpack(row) for row in self.sum(slots)]

    def broadcast(self, array: compat.Array) -> compat.Array:
        """Returns the array of the first process, bit by bit; all pass arrays of the same type."""
        data = array.tobytes()
        halves = np.frombuffer(data + b"\0" * (len(data) % 2), np.uint16)
        slots = (halves if self.rank == 0 else np.zeros_like(halves)).astype(np.float32)
        received = self.sum(slots[None]).astype(np.uint16).tobytes()[: len(data)]
        return np.frombuffer(received, array.dtype).reshape(array.shape)

    def sum(self, array: compat.Array) -> compat.Array:
        """Sums a matrix of float32 over the processes."""
        with current_activity().during(Activity.MEETING):
            sums: compat.Array = compat.local(self._strategy, self._sum(tf.constant(array))).numpy()
            return sums

    def _sum_over_workers(self, slots: tf.Tensor) -> tf.Tensor:
        def replica(slots: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            # Only the first replica of a process sends. The product is placed on the replica's
            # device, as all_reduce requires.
            sends = tf.cast(tf.equal(context.replica_id_in_sync_group, self.rank), slots.dtype)
            return context.all_reduce(tf.distribute.ReduceOp.SUM, sends * slots)

        return self._strategy.run(replica, args=(slots,))


mirrored_collectives = functools.cache(MirroredCollectives)
"""Returns the collectives of a strategy, always the same ones."""


class LocalReplicas:
    """Collectives of replicas that all belong to one process."""

    rank = 0

    def __init__(self, replicas: int) -> None:
        self.workers = replicas

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Returns the values of this process for each of its replicas."""
        return [list(values) for _ in range(self.workers)]


class ReplicaSessions(list[WorkerSession]):
    """Sessions of the replicas of this process, in the order of their ranks.

    The unit of allocation is the replica: a device, with a batch size and a predictor of its own.
    Only the first of them, the leader, communicates with other processes. Methods act on all of
    them. `collectives` have the rank of this process's first replica.
    """

    def __init__(
        self,
        collectives: Collectives,
        count: int,
        global_batch_size: int,
        options: SessionOptions,
        versions: Mapping[str, str],
        activity: CurrentActivity | None = None,
        devices: Devices | None = None,
    ) -> None:
        followers = [_Follower(collectives.rank + i, collectives.workers) for i in range(1, count)]
        super().__init__(
            WorkerSession(
                member,
                global_batch_size,
                options,
                framework="tensorflow",
                versions=versions,
                activity=activity if member is collectives else None,
                devices=devices,
            )
            for member in (collectives, *followers)
        )
        self.leader = self[0]  # through which the process communicates

    def start(self, facts: Facts) -> None:
        """Starts all sessions with one handshake of the leader; see `WorkerSession.start`."""
        self.leader.start(facts)
        for session in self[1:]:
            session.start(facts, self.leader.peers)

    def exclude_step(self) -> None:
        """Excludes the running step from learning, because it contains other work."""
        for session in self:
            session.exclude_step()

    def save_state(self) -> tuple[Json, Arrays]:
        """Returns the state of all replicas of the job; see `WorkerSession.save_state`."""
        return self.leader.save_state(self[1:])

    def load_state(self, state: Json, arrays: Mapping[str, compat.Array]) -> None:
        """Continues from a saved state; see `WorkerSession.load_state`."""
        for session in self:
            session.load_state(state, arrays)

    def close(self) -> None:
        """Ends a fit; see `WorkerSession.close`."""
        for session in self:
            session.close()


class _Follower(NamedTuple):
    """Collectives of another replica of the same process, whose leader communicates."""

    rank: int
    workers: int

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        raise NotImplementedError("only the first replica of a process communicates")
