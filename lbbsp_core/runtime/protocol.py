"""Messages that workers exchange in each step, as exact integers.

A message is a row of float32 values that each hold an integer below 2^24, because that is what
every framework's gradient all-reduce carries without rounding: a worker puts its row into a
``(workers, WIDTH)`` array of zeros, the *sum* over workers is then an exact all-gather, with
the same bits everywhere (adding zeros is exact). It is piggybacked on the gradients, at no extra
collective. At the start, `compare_facts` checks that all workers agree on what never changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost import Affine, Cost, PiecewiseCost, Segment

_LIMB = 1 << 24
_LARGEST = _LIMB * _LIMB - 1
"""Two limbs: 2.8e14, in picoseconds per sample 281 s, in nanoseconds 78 hours."""

_MILLION = 1e6 * (1 + 1e-12)
"""Keeps a whole number of millionths from being rounded down to the one before."""

_STOP = 1
_HELD = 2


class DisagreementError(RuntimeError):
    """A static fact, or a plan, differs between workers that must agree on it."""


@dataclass(frozen=True, slots=True)
class StepMessage:
    """Message of one worker about a step, all integers (rule 3).

    Args:
        picoseconds_per_sample: Predicted slowness, 1 / speed; 0 for "no estimate yet".
        overhead_nanoseconds: Predicted fixed part of an iteration.
        busy_nanoseconds: Measured in this step.
        checksum: 24 bits of the sender's latest plan.
        stop: The sender asks all workers to stop after this step.
        held: The measurement of this step is not to be learned from.
    """

    picoseconds_per_sample: int
    overhead_nanoseconds: int
    busy_nanoseconds: int
    checksum: int
    stop: bool = False
    excluded: bool = False


WIDTH = 10
"""Values in a message's row: two limbs for each of its five integers."""

Row = npt.NDArray[np.float32]


def pack(values: Sequence[int]) -> Row:
    """Packs integers in [0, 2^48) into limbs below 2^24, shape ``(2 * len(values),)``."""
    limbs = [limb for value in values for limb in divmod(_clamp(value), _LIMB)]
    return np.array(limbs, dtype=np.float32)


def unpack(row: Iterable[float]) -> list[int]:
    """Unpacks the integers of a row; the inverse of `pack`."""
    limbs = [int(limb) for limb in row]
    return [high * _LIMB + low for high, low in zip(limbs[::2], limbs[1::2], strict=True)]


def encode(message: StepMessage) -> Row:
    """Packs a message into a row of shape ``(WIDTH,)``."""
    return pack(
        (
            message.picoseconds_per_sample,
            message.overhead_nanoseconds,
            message.busy_nanoseconds,
            message.checksum,
            _STOP * message.stop + _HELD * message.excluded,
        )
    )


def decode(row: Iterable[float]) -> StepMessage:
    """Unpacks a row of shape ``(WIDTH,)``; the inverse of `encode`."""
    slope, overhead, busy, plan, flags = unpack(row)
    return StepMessage(
        slope, overhead, busy, plan, stop=bool(flags & _STOP), excluded=bool(flags & _HELD)
    )


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Static facts of a worker, sent to its peers before the first step.

    Args:
        segments: Its marginal cost, see `lbbsp_core.CostShape.marginal_segments`; crosses in
            millionths of a sample.
        max_batch: The largest batch that its memory holds, or None.
    """

    segments: tuple[Segment, ...]
    max_batch: int | None = None

    def pack(self) -> list[int]:
        """Packs into integers. Rows may be filled up to one length: the rest is not read."""
        # Slopes are rounded down: no segment may end above where the next one starts.
        numbers = [
            (x, round(work * 1e6), int(slope * _MILLION)) for x, work, slope in self.segments
        ]
        body = [number for piece in numbers for number in piece]
        return [self.max_batch or 0, len(self.segments), *body]

    @staticmethod
    def unpack(row: Sequence[int]) -> PeerInfo:
        """Unpacks a row; the inverse of `pack`."""
        max_batch, count, *body = row
        body = body[: 3 * count]
        triples = zip(body[::3], body[1::3], body[2::3], strict=True)
        segments = tuple((start, work / 1e6, slope / 1e6) for start, work, slope in triples)
        return PeerInfo(segments, max_batch or None)


LINE: tuple[Segment, ...] = ((0, 0.0, 1.0),)
"""Marginal cost where the shape of a cost is a straight line."""


def quantise(speed: float, overhead: float) -> tuple[int, int]:
    """Converts a predicted curve to picoseconds per sample and nanoseconds of overhead.

    Args:
        speed: Work per second; 0 for "no estimate yet", which gives zeros.
        overhead: kappa, the work of an empty batch, in samples.
    """
    if not speed:
        return 0, 0
    return max(1, round(1e12 / speed)), round(overhead / speed * 1e9)


def curve(message: StepMessage, shape: tuple[Segment, ...] = LINE) -> Cost | None:
    """Returns the cost that a worker predicts for itself, the same from the same integers."""
    if not message.picoseconds_per_sample:
        return None
    overhead, slope = message.overhead_nanoseconds / 1e9, message.picoseconds_per_sample / 1e12
    if shape == LINE:
        return Affine(overhead, slope)
    return PiecewiseCost(tuple((x, overhead + w * slope, m * slope) for x, w, m in shape))


def checksum(sizes: Sequence[int]) -> int:
    """Returns 24 bits of a plan: unequal plans share them in 1 of 16 million cases."""
    return zlib.crc32(repr(tuple(sizes)).encode()) % _LIMB


def fingerprint(text: str) -> int:
    """Returns 31 bits of a text, to compare it as an integer fact."""
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def compare_facts(
    names: Sequence[str], rows: Sequence[Sequence[int]], shown: Mapping[str, str] | None = None
) -> None:
    """Raises if the workers do not agree on a static fact.

    Args:
        names: Names of the facts.
        rows: Values by rank, shape ``(workers, facts)``.
        shown: Text to show instead of a number, for facts that are fingerprints: the value on
            this worker.

    Raises:
        DisagreementError: Naming the fact, the ranks and their values.
    """
    for column, name in enumerate(names):
        values = [int(row[column]) for row in rows]
        for rank, value in enumerate(values):
            if value != values[0]:
                local = f" (here: {shown[name]})" if shown and name in shown else ""
                raise DisagreementError(
                    f"workers disagree on {name}: worker 0 has {values[0]}, worker {rank} has "
                    f"{value}{local}; start all workers with the same {name}"
                )


def _clamp(value: int) -> int:
    return max(0, min(int(value), _LARGEST))
