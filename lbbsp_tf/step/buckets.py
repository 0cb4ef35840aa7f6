"""Buckets of gradients, which are summed while the backward pass computes the others.

As in PyTorch's DistributedDataParallel (Li et al., VLDB 2020, section 3.2.3). Small buckets hide
more of the communication, but each of them costs a latency; and where the processors themselves do
the communication, as between processes of one machine, there is nothing to hide. A short
measurement at the start of a training decides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import tensorflow as tf

from lbbsp_core.resources.cgroup import cpu_quotas
from lbbsp_core.resources.host import Host
from lbbsp_core.runtime.exchange.collectives import Collectives
from lbbsp_tf import compat
from lbbsp_tf.compat import Gradients
from lbbsp_tf.exchange.collectives import MirroredCollectives

FULL: Final = 1 << 20
"""Bytes of an all-reduce that is measured."""

_TRIALS: Final = 3
_LATENCIES: Final = 10  # of an all-reduce, in the time that a bucket travels
_BUSY: Final = 0.5  # share of the processors that may be busy with the communication


def in_buckets(gradients: Gradients, bucket_bytes: int) -> list[list[int]]:
    """Returns the places of gradients by bucket, in the order in which they are sent.

    The backward pass begins at the last layers: the order is the reverse of the gradients' own. A
    bucket is closed once it has `bucket_bytes`; the last one has the rest. With 0 there is one. The
    rows of sparse gradients are not known, and do not count.
    """
    buckets: list[list[int]] = [[]]
    filled = 0
    for place in reversed(range(len(gradients))):
        if 0 < bucket_bytes <= filled:
            buckets.append([])
            filled = 0
        buckets[-1].append(place)
        gradient = gradients[place]
        if not isinstance(gradient, tf.IndexedSlices):
            filled += (gradient.shape.num_elements() or 0) * gradient.dtype.size
    return buckets


class Transfer(NamedTuple):
    """What a worker has measured of all-reduces.

    Args:
        empty: Nanoseconds of one without content.
        full: Nanoseconds of one of `FULL` bytes.
        processor: Nanoseconds of work in it by this worker's processors.
        cores: Thousandths of processors that this worker may use.
    """

    empty: int
    full: int
    processor: int
    cores: int


def choose_bytes(transfers: Sequence[Transfer], hosts: Sequence[str]) -> int:
    """Returns the bytes of a bucket, 0 for a single one; the same from the same integers (rule 3).

    Args:
        transfers: What the workers have measured, by rank.
        hosts: Name of each worker's machine, by rank.
    """
    for each in set(hosts):
        here = [t for t, host in zip(transfers, hosts, strict=True) if host == each]
        available = max(t.full * t.cores for t in here) / 1000
        if sum(t.processor for t in here) > _BUSY * available:
            return 0
    empty = max(t.empty for t in transfers)
    full = max(t.full for t in transfers)
    return _LATENCIES * empty * FULL // max(full - empty, 1)


def measured_bytes(
    strategy: tf.distribute.Strategy, collectives: Collectives, hosts: Sequence[str]
) -> int:
    """Returns the bytes of a bucket, 0 for a single one; a collective.

    ``CommunicationOptions(bytes_per_pack=...)`` of the strategy win. Between the devices of one
    process nothing is measured, and there is one bucket.
    """
    chosen = compat.bytes_per_pack(strategy)
    if chosen or not isinstance(collectives, MirroredCollectives):
        return chosen
    # The fastest trial was disturbed least.
    empty, _ = min(_all_reduce(collectives, 0) for _ in range(_TRIALS))
    full = min(_all_reduce(collectives, FULL) for _ in range(_TRIALS))
    host = Host()
    cores = min([len(host.cores), *cpu_quotas(host)])
    told = collectives.all_gather([empty, *full, round(1000 * cores)])
    return choose_bytes([Transfer(*row) for row in told], hosts)


def _all_reduce(collectives: MirroredCollectives, size: int) -> tuple[int, int]:
    """Returns the nanoseconds of an all-reduce of `size` bytes, and of the processors' work."""
    array = np.zeros((1, max(size // 4, 1)), np.float32)
    began, worked = time.perf_counter_ns(), time.process_time_ns()
    collectives.sum(array)
    return time.perf_counter_ns() - began, time.process_time_ns() - worked
