"""Collective operations that a plugin supplies in addition to the gradient all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

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
    padded = data.ljust(-(-max(lengths) // _INTEGER) * _INTEGER, b"\0")
    integers = [
        int.from_bytes(padded[i : i + _INTEGER], "big") for i in range(0, len(padded), _INTEGER)
    ]
    rows = collectives.all_gather(integers)
    return [
        b"".join(integer.to_bytes(_INTEGER, "big") for integer in row)[:length]
        for row, length in zip(rows, lengths, strict=True)
    ]
