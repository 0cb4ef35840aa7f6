"""Small all-gathers of integers, for the handshake and the ends of epochs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from lbbsp_core.runtime.exchange.protocol import pack, unpack
from lbbsp_core.runtime.reliability.activity import Activity
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
        self._local = self.workers // processes  # replicas of this process
        self.rank = rank * self._local
        rows = tf.TensorSpec([None, None], tf.float32)
        self._sum = tf.function(self._sum_over_workers, input_signature=[rows], autograph=False)

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Gathers integers in [0, 2^48) by rank; returns shape ``(workers, len(values))``.

        The values of a process are those of each of its replicas.
        """
        if not values:
            return [[] for _ in range(self.workers)]  # TensorFlow crashes in a sum of nothing
        slots = np.zeros((self.workers, 2 * len(values)), np.float32)
        slots[self.rank : self.rank + self._local] = pack(values)
        with current_activity().during(Activity.MEETING), compat.explained_by_variables():
            rows = compat.local(self._strategy, self._sum(tf.constant(slots)))
        return [unpack(row) for row in rows.numpy()]

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """Returns the array of the first process, bit by bit; all pass arrays of the same type."""
        data = array.tobytes()
        halves = np.frombuffer(data + b"\0" * (len(data) % 2), np.uint16)
        slots = (halves if self.rank == 0 else np.zeros_like(halves)).astype(np.float32)
        with current_activity().during(Activity.MEETING):
            total = compat.local(self._strategy, self._sum(tf.constant(slots[None])))
        received = total.numpy().astype(np.uint16).tobytes()[: len(data)]
        return np.frombuffer(received, array.dtype).reshape(array.shape)

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
