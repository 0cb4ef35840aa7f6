"""Buckets of gradients, which are summed while the backward pass computes the others.

As in PyTorch's DistributedDataParallel (Li et al., VLDB 2020, section 3.2.3). Small buckets hide
more of the communication, but each of them costs a latency; and where the processors themselves do
the communication, as between processes of one machine, there is nothing to hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

MEASURED_BYTES: Final = 1 << 20
"""Bytes of an all-reduce that is measured."""

_LATENCIES: Final = 10  # of an all-reduce, in the time that a bucket travels
_BUSY: Final = 0.5  # share of the processors that may be busy with the communication


def in_buckets(sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Returns the numbers of gradients by bucket, in the order in which they are sent.

    The backward pass begins at the last layers: the order is the reverse of the gradients' own. A
    bucket is closed once it has `bucket_bytes`; the last one has the rest, of one gradient or more.

    Args:
        sizes: Bytes of each gradient.
        bucket_bytes: Bytes of a bucket, >= 0; 0: there is one bucket.

    Example:
        >>> in_buckets([400, 8, 16, 8], 24)
        [[3, 2], [1, 0]]
    """
    buckets: list[list[int]] = [[]]
    filled = 0
    for number in reversed(range(len(sizes))):
        if 0 < bucket_bytes <= filled:
            buckets.append([])
            filled = 0
        buckets[-1].append(number)
        filled += sizes[number]
    return buckets


class Transfer(NamedTuple):
    """What a worker has measured of all-reduces.

    Args:
        empty: Nanoseconds of one without content.
        full: Nanoseconds of one of `MEASURED_BYTES`.
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
        hosts: Name of each worker's machine, by rank. Containers of one machine that have names of
            their own count as machines.
    """
    for machine in set(hosts):
        here = [t for t, host in zip(transfers, hosts, strict=True) if host == machine]
        available = max(t.full * t.cores for t in here) / 1000
        if sum(t.processor for t in here) > _BUSY * available:
            return 0
    empty = max(t.empty for t in transfers)
    full = max(t.full for t in transfers)
    return _LATENCIES * empty * MEASURED_BYTES // max(full - empty, 1)
