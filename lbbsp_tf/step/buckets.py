"""Size of the buckets in which gradients travel, from a short measurement before a training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import tensorflow as tf

from lbbsp_core.resources.cgroup import cpu_quotas
from lbbsp_core.resources.host import Host
from lbbsp_core.runtime.exchange.buckets import MEASURED_BYTES, Transfer, choose_bytes
from lbbsp_core.runtime.exchange.collectives import Collectives
from lbbsp_tf import compat
from lbbsp_tf.compat import TensorLike
from lbbsp_tf.exchange.collectives import MirroredCollectives

_TRIALS: Final = 3


def bytes_of(gradient: TensorLike) -> int:
    """Returns the bytes of a gradient; 0 if it is sparse, because its rows are not known yet."""
    if isinstance(gradient, tf.IndexedSlices):
        return 0
    return int((gradient.shape.num_elements() or 0) * gradient.dtype.size)


def measured_bytes(
    strategy: tf.distribute.Strategy, collectives: Collectives, hosts: Sequence[str]
) -> int:
    """Returns the bytes of a bucket, 0 for a single one; a collective.

    ``CommunicationOptions(bytes_per_pack=...)`` of the strategy win. `MirroredStrategy` has one
    bucket. `hosts` are the workers' machines.
    """
    chosen = compat.bytes_per_pack(strategy)
    if chosen or not isinstance(collectives, MirroredCollectives):
        return chosen
    # The fastest trial was disturbed least.
    empty, _ = min(_all_reduce(collectives, 0) for _ in range(_TRIALS))
    full = min(_all_reduce(collectives, MEASURED_BYTES) for _ in range(_TRIALS))
    host = Host()
    cores = min([len(host.cores), *cpu_quotas(host)])
    rows = collectives.all_gather([empty, *full, round(1000 * cores)])
    processes = slice(None, None, collectives.local)  # of each the first replica: all say the same
    return choose_bytes([Transfer(*row) for row in rows[processes]], hosts[processes])


def _all_reduce(collectives: MirroredCollectives, size: int) -> tuple[int, int]:
    """Returns the nanoseconds of an all-reduce of `size` bytes, and of the processors' work."""
    array = np.zeros((1, max(size // 4, 1)), np.float32)
    began, worked = time.perf_counter_ns(), time.process_time_ns()
    collectives.sum(array)
    return time.perf_counter_ns() - began, time.process_time_ns() - worked
