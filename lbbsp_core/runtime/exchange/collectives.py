"""Collective operations that a plugin supplies in addition to the gradient all-reduce."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, runtime_checkable

from lbbsp_core.runtime.exchange.protocol import DisagreementError

_INTEGER: Final = 6
"""Bytes of an integer that can be gathered: it is below 2^48."""


@runtime_checkable
class Collectives(Protocol):
    """Collective operations that a session needs in addition to the gradient all-reduce."""

    @property
    def rank(self) -> int:
        """Number of this worker, in [0, workers)."""
        ...

    @property
    def workers(self) -> int:
        """Number of workers, N."""
        ...

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Gathers integers in [0, 2^48) from all workers, which must all call it.

        Gathers are small and rare: they occur in the handshake and at the ends of epochs.

        Returns:
            The values by rank, shape ``(workers, len(values))``, the same on every worker.
        """
        ...


class SingleWorker:
    """Collectives of one worker without peers."""

    rank = 0
    workers = 1

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Returns the values as the only row."""
        return [list(values)]


def gather_bytes(collectives: Collectives, data: bytes) -> list[bytes]:
    """Returns the bytes of all workers by rank, of any length; a collective."""
    lengths = [row[0] for row in collectives.all_gather([len(data)])]
    rows = collectives.all_gather(to_integers(data.ljust(max(lengths), b"\0")))
    return [from_integers(row)[:length] for row, length in zip(rows, lengths, strict=True)]


def to_integers(data: bytes) -> list[int]:
    """Returns bytes as integers in [0, 2^48); zeros fill the last one."""
    pieces = (data[start : start + _INTEGER] for start in range(0, len(data), _INTEGER))
    return [int.from_bytes(piece.ljust(_INTEGER, b"\0"), "big") for piece in pieces]


def from_integers(integers: Iterable[int]) -> bytes:
    """Returns the bytes of `to_integers`, with the zeros that have filled the last integer."""
    return b"".join(integer.to_bytes(_INTEGER, "big") for integer in integers)


def gather_floats(collectives: Collectives, values: Sequence[float]) -> list[tuple[float, ...]]:
    """Returns the numbers of all workers by rank, bit for bit; a collective."""
    rows = gather_bytes(collectives, struct.pack(f">{len(values)}d", *values))
    return [struct.unpack(f">{len(row) // 8}d", row) for row in rows]


def weighted_mean(
    collectives: Collectives, values: Sequence[float], weight: float = 1.0
) -> list[float]:
    """Returns the weighted mean over workers of each value, the same bits on all; a collective.

    The mean of ``v_i`` with weights ``w_i`` is ``sum(w_i v_i) / sum(w_i)``, summed in the order of
    the ranks. Values of workers with weight 0 do not count, whatever they are. Weights are finite
    and >= 0, and at least one is > 0; errors are raised on all workers.

    Example:
        >>> weighted_mean(SingleWorker(), [0.25, 3.0], weight=10)
        [0.25, 3.0]
    """
    rows = gather_floats(collectives, [weight, *values])
    _check_rows(rows)
    counted = [row for row in rows if row[0] > 0]
    weights = [row[0] for row in counted]
    return [_mean(column, weights) for column in list(zip(*counted, strict=True))[1:]]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    if all(value == values[0] for value in values):  # without rounding
        return values[0]
    total = weighted = 0.0
    for value, weight in zip(values, weights, strict=True):
        total += weight
        weighted += weight * value
    return weighted / total


def _check_rows(rows: Sequence[Sequence[float]]) -> None:
    for rank, (weight, *values) in enumerate(rows):
        if len(values) != len(rows[0]) - 1:
            raise DisagreementError(
                f"workers must give equally many values for a mean: worker 0 gives "
                f"{len(rows[0]) - 1}, worker {rank} gives {len(values)}"
            )
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"the weight of a mean must be >= 0 and finite, got {weight!r} on worker {rank}: "
                "give for example a number of samples"
            )
    if not any(row[0] for row in rows):
        raise ValueError(
            "a weight of the mean must be > 0 on at least one worker, got 0 on all: give for "
            "example a number of samples"
        )


def sums(collectives: Collectives, values: Sequence[float]) -> list[float]:
    """Sums numbers over workers, with the same bits on every worker; a collective.

    The numbers of worker 0 come first: another order could round differently.
    """
    rows = gather_floats(collectives, values)
    counts = [len(row) for row in rows]
    if len(set(counts)) > 1:
        raise ValueError(
            f"all workers must sum the same number of values, got {counts} by rank: give them the "
            "same metrics"
        )
    totals = [0.0] * len(values)
    for row in rows:
        totals = [a + b for a, b in zip(totals, row, strict=True)]
    return totals
