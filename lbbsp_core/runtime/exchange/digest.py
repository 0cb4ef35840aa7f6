"""Digests of weights and of samples, by which workers notice that theirs differ.

Workers on different processors have values that differ in the last bits, even where nothing is
wrong. A digest is therefore no hash: it is a projection on a fixed random vector, compared with a
tolerance. Values that differ by more than the tolerance have different projections.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lbbsp_core.runtime.exchange.collectives import Collectives, gather_floats
from lbbsp_core.runtime.exchange.protocol import DisagreementError

Array = npt.NDArray[Any]

TOLERANCE: Final = 1e-3
"""Difference of two projections that counts as one of values, relative to the norm."""

SAMPLE_TOLERANCE: Final = 2e-2
"""The same for a sample: workers may decode images by different libraries.

A difference of one in a quarter of the levels from 0 to 255 makes up to 2e-2 in small standardised
images (0.5e-2 in levels), and another image 0.1 to 0.5.
"""

SAMPLES: Final = 64
"""Number of samples of a data set that are compared."""

_TILE: Final = 4096
_HALF: Final = 1 << 24


class Digest(NamedTuple):
    """Digest of arrays.

    Args:
        projection: Scalar product with a fixed random vector.
        norm: Euclidean norm.
    """

    projection: float
    norm: float

    @classmethod
    def of(cls, arrays: Iterable[Array]) -> Digest:
        """Computes the digest of arrays of numbers, in one pass over them.

        Example:
            >>> Digest.of([np.zeros(3), np.array([3.0, 4.0])]).norm
            5.0
        """
        projection = squares = 0.0
        with np.errstate(all="ignore"):  # weights may have become NaN, on all workers alike
            for number, array in enumerate(arrays):
                term, squared = _project(array)
                projection += term * math.sin(1.0 + number)  # arrays that change places count
                squares += squared
        return cls(projection, math.sqrt(squares) if squares >= 0 else math.nan)

    def to_integer(self) -> int:
        """Encodes the digest in 48 bits, with 16 bits of precision for each number."""
        return _bits(self.projection) * _HALF + _bits(self.norm)

    @classmethod
    def from_integer(cls, value: int) -> Digest:
        """Decodes what `to_integer` returned."""
        return cls(*map(_number, divmod(value, _HALF)))

    def is_close(self, other: Digest, tolerance: float = TOLERANCE) -> bool:
        """Returns whether two digests are equal up to a tolerance, or both not finite."""
        if not (_is_finite(self) and _is_finite(other)):
            return _is_finite(self) == _is_finite(other)
        scale = max(self.norm, other.norm)
        return all(abs(a - b) <= tolerance * scale for a, b in zip(self, other, strict=True))


def sampled(count: int) -> npt.NDArray[np.int64]:
    """Returns the numbers of the samples to compare, of `count` samples, ascending."""
    chosen = np.random.default_rng(0).choice(count, min(count, SAMPLES), replace=False)
    return np.sort(chosen).astype(np.int64)


def different_row(rows: Sequence[Sequence[Digest]]) -> tuple[int, int] | None:
    """Returns the first worker whose digests differ from worker 0's, and where, or None."""
    for rank, row in enumerate(rows):
        for place, (first, digest) in enumerate(zip(rows[0], row, strict=True)):
            if not first.is_close(digest, SAMPLE_TOLERANCE):
                return rank, place
    return None


def check_samples(
    collectives: Collectives, digests: Sequence[Digest], what: str = "the data"
) -> None:
    """Checks that all workers have the same samples, of which they give as many digests.

    Every worker must call it at the same time. The error names `what`.

    Raises:
        DisagreementError: Samples differ; names the rank, and the remedy.
    """
    numbers = gather_floats(collectives, [number for digest in digests for number in digest])
    rows = [list(starmap(Digest, zip(row[::2], row[1::2], strict=True))) for row in numbers]
    if (difference := different_row(rows)) is not None:
        rank, _ = difference
        raise DisagreementError(
            f"workers disagree on {what}: samples of worker {rank} differ from those of worker 0 "
            "with the same numbers; pass the whole data set in the same order to all workers (give "
            "every shuffle a seed, sort lists of files)"
        )


def _project(array: Array) -> tuple[float, float]:
    flat = np.asarray(array).reshape(-1)
    if flat.dtype not in (np.float32, np.float64):
        flat = flat.astype(np.float64 if flat.dtype.kind in "iub" else np.float32)
    whole = len(flat) // _TILE * _TILE
    rows, remainder, tile = flat[:whole].reshape(-1, _TILE), flat[whole:], _tile(flat.dtype.name)
    # By einsum: BLAS would wake a thread on every core, see `_gram` of `lbbsp_core.predict.narx`.
    sums = np.einsum("ij,j->i", rows, tile) * np.resize(_tile("float64")[::-1], len(rows))
    squares = np.einsum("ij,ij->i", rows, rows).astype(np.float64)
    projection = float(sums.sum()) + float(remainder @ tile[: len(remainder)])
    return projection, float(squares.sum()) + float(remainder @ remainder)


@functools.cache
def _tile(dtype: str) -> Array:
    return np.random.default_rng(0).uniform(-1.0, 1.0, _TILE).astype(dtype)


def _bits(number: float) -> int:
    """Returns the upper 24 bits of a number in single precision."""
    with np.errstate(all="ignore"):
        return int.from_bytes(struct.pack(">f", np.float32(number)), "big") >> 8


def _number(bits: int) -> float:
    return float(struct.unpack(">f", (bits << 8).to_bytes(4, "big"))[0])


def _is_finite(digest: Digest) -> bool:
    return all(map(math.isfinite, digest))
