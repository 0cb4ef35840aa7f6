"""Small all-gathers of integers, for the handshake and the ends of epochs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from lbbsp_core.runtime.protocol import pack, unpack
from lbbsp_tf import compat
from lbbsp_tf.cluster import rank_and_workers


@functools.cache
def mirrored_collectives(strategy: tf.distribute.Strategy) -> MirroredCollectives:
    """Returns the collectives of a multi-worker strategy, always the same ones."""
    return MirroredCollectives(strategy, *rank_and_workers(strategy.cluster_resolver))


class MirroredCollectives:
    """Collectives of a multi-worker strategy, which every worker must call.

    Args:
        strategy: Strategy of the workers.
        rank: Number of this worker, in [0, workers).
        workers: Number of workers, N.
    """

    def __init__(self, strategy: tf.distribute.Strategy, rank: int, workers: int) -> None:
        self.rank, self.workers = rank, workers
        self._strategy = strategy
        rows = tf.TensorSpec([None, None], tf.float32)
        self._sum = tf.function(self._sum_over_workers, input_signature=[rows], autograph=False)

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Gathers integers in [0, 2^48) by rank; returns shape ``(workers, len(values))``."""
        slots = np.zeros((self.workers, 2 * len(values)), np.float32)
        slots[self.rank] = pack(values)
        rows = compat.local(self._strategy, self._sum(tf.constant(slots)))
        return [unpack(row) for row in rows.numpy()]

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """Returns the array of rank 0, bit by bit; all workers pass arrays of the same type."""
        data = array.tobytes()
        halves = np.frombuffer(data + b"\0" * (len(data) % 2), np.uint16)
        slots = (halves if self.rank == 0 else np.zeros_like(halves)).astype(np.float32)
        total = compat.local(self._strategy, self._sum(tf.constant(slots[None])))
        received = total.numpy().astype(np.uint16).tobytes()[: len(data)]
        return np.frombuffer(received, array.dtype).reshape(array.shape)

    def _sum_over_workers(self, slots: tf.Tensor) -> tf.Tensor:
        def replica(slots: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            # The identity is placed on the replica's device, as all_reduce requires.
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(slots))

        return self._strategy.run(replica, args=(slots,))
