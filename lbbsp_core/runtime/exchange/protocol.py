"""Messages that workers exchange in each step, as exact integers.

A message is a row of float32 values that each represent an integer below 2^24, because the
gradient all-reduce of every framework transports these without rounding. Each worker puts its row
into a ``(workers, WIDTH)`` array of zeros; the *sum* over workers is then an exact all-gather,
with the same bits on every worker (adding zeros is exact). It is piggybacked on the gradient
all-reduce. What stays the same is compared before the first step, see
`lbbsp_core.runtime.exchange.handshake`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost import Affine, Cost, PiecewiseCost, Segment
from lbbsp_core.resources import FACTORS

FORMAT: Final = 4
"""Version of the messages, which workers compare before the first step."""

LIMB: Final = 1 << 24
"""Integers below it are exact in float32."""

_LARGEST = LIMB * LIMB - 1
"""Largest integer in two limbs, 2.8e14: 281 s in picoseconds, 78 hours in nanoseconds."""

_MILLION = 1e6 * (1 + 1e-12)
"""Slightly more than a million, so that truncation keeps a whole number of millionths."""

_HUNDREDTHS = 100

_EXCLUDED = 1
_RETRACED = 2


class DisagreementError(RuntimeError):
    """Raised when a static fact or a plan differs between workers that must agree on it."""


@dataclass(frozen=True, slots=True)
class StepMessage:
    """Message of one worker about a step, all integers (rule 3).

    Args:
        picoseconds_per_sample: Predicted slowness, 1 / speed; 0 if there is no estimate yet.
        overhead_nanoseconds: Predicted fixed part of an iteration.
        busy_nanoseconds: Busy time measured in this step; 0 if it is invalid.
        checksum: 24-bit checksum of the sender's step and latest plan.
        excluded: Whether the measurement of this step is excluded from learning.
        drivers: Driving factors that the sender knows now, before its next step, by name; in
            hundredths, cut off above 167,772.
        retraced: Whether the sender's step was traced or compiled anew, so that it has run no batch
            size yet.
        hidden_nanoseconds: Time in this step in which gradients of the sender were on their way
            while it computed others. That of the slowest worker counts: others also wait then for
            it.
        extra: Integers below 2^24 of the session's extensions.
    """

    picoseconds_per_sample: int
    overhead_nanoseconds: int
    busy_nanoseconds: int
    checksum: int
    excluded: bool = False
    drivers: Mapping[str, float] = field(default_factory=dict)
    retraced: bool = False
    hidden_nanoseconds: int = 0
    extra: tuple[int, ...] = ()


_DRIVERS = 10  # four integers of two limbs, the checksum, and the flags are before them

WIDTH = _DRIVERS + len(FACTORS)
"""Length of a message's row without `StepMessage.extra`."""

Row = npt.NDArray[np.float32]


def pack(values: Sequence[int]) -> Row:
    """Packs integers in [0, 2^48) into limbs below 2^24, shape ``(2 * len(values),)``."""
    return np.array(_limbs(values), dtype=np.float32)


def unpack(row: Iterable[float]) -> list[int]:
    """Unpacks the integers of a row; the inverse of `pack`."""
    limbs = [int(limb) for limb in row]
    return [high * LIMB + low for high, low in zip(limbs[::2], limbs[1::2], strict=True)]


def pack_float(value: float) -> tuple[int, int]:
    """Splits the 64 bits of a float into two integers below 2^32, which `pack` accepts."""
    high, low = struct.unpack(">II", struct.pack(">d", value))
    return high, low


def unpack_float(halves: Sequence[int]) -> float:
    """Joins the two integers of a float; the inverse of `pack_float`."""
    return float(struct.unpack(">d", struct.pack(">II", *halves))[0])


def encode(message: StepMessage) -> Row:
    """Packs a message into a row of shape ``(WIDTH + len(message.extra),)``."""
    times = (
        message.picoseconds_per_sample,
        message.overhead_nanoseconds,
        message.busy_nanoseconds,
        message.hidden_nanoseconds,
    )
    flags = _EXCLUDED * message.excluded + _RETRACED * message.retraced
    drivers = [  # one more than hundredths, 0 if absent
        min(1 + round(message.drivers[name] * _HUNDREDTHS), LIMB - 1)
        if name in message.drivers
        else 0
        for name in FACTORS
    ]
    return np.array([*_limbs(times), message.checksum, flags, *drivers, *message.extra], np.float32)


def decode(row: Iterable[float]) -> StepMessage:
    """Unpacks a row; the inverse of `encode`."""
    limbs = [int(limb) for limb in row]
    *times, plan, flags = limbs[:_DRIVERS]
    slope, overhead, busy, hidden = unpack(times)
    return StepMessage(
        slope,
        overhead,
        busy,
        plan,
        excluded=bool(flags & _EXCLUDED),
        retraced=bool(flags & _RETRACED),
        drivers={
            name: (limb - 1) / _HUNDREDTHS
            for name, limb in zip(FACTORS, limbs[_DRIVERS:WIDTH], strict=True)
            if limb
        },
        hidden_nanoseconds=hidden,
        extra=tuple(limbs[WIDTH:]),
    )


def _limbs(values: Iterable[int]) -> list[int]:
    return [limb for value in values for limb in divmod(max(0, min(int(value), _LARGEST)), LIMB)]


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Static facts of a worker, sent to its peers before the first step.

    Args:
        segments: Marginal work, see `lbbsp_core.CostShape.marginal_segments`; sent in millionths
            of a sample.
        max_batch: Largest batch that fits in the worker's memory; None if unknown.
        granularity: Samples of which batches are multiples, for the worker's device.
        shows_memory: Whether the memory in use of its device bounds its batch.
        overhead: Overhead of the worker's prior cost in samples, such as of a profile; 0 without
            one.
    """

    segments: tuple[Segment, ...]
    max_batch: int | None = None
    granularity: int = 1
    shows_memory: bool = False
    overhead: float = 0.0

    def pack(self) -> list[int]:
        """Packs the facts into integers."""
        overhead = round(self.overhead * 1e6)
        row = [self.max_batch or 0, self.granularity, int(self.shows_memory), overhead]
        # Slopes are rounded down: no segment may end above where the next one starts.
        for x, work, slope in self.segments:
            row += [x, round(work * 1e6), int(slope * _MILLION)]
        return row

    @staticmethod
    def unpack(row: Sequence[int]) -> PeerInfo:
        """Unpacks a row; the inverse of `pack`."""
        max_batch, granularity, shows_memory, overhead, *body = row
        triples = zip(body[::3], body[1::3], body[2::3], strict=True)
        segments = tuple((start, work / 1e6, slope / 1e6) for start, work, slope in triples)
        facts = max_batch or None, granularity, bool(shows_memory), overhead / 1e6
        return PeerInfo(segments, *facts)


LINE: tuple[Segment, ...] = ((0, 0.0, 1.0),)
"""Marginal work of a cost whose shape is a straight line."""


def quantise(speed: float, overhead: float) -> tuple[int, int]:
    """Converts a predicted cost to picoseconds per sample and nanoseconds of overhead.

    A speed of 0 means that there is no estimate yet, and gives zeros.
    """
    if not speed:
        return 0, 0
    return max(1, round(1e12 / speed)), round(overhead / speed * 1e9)


def curve(message: StepMessage, shape: tuple[Segment, ...] = LINE) -> Cost | None:
    """Returns the predicted cost, if there is one; equal integers give bit-identical costs."""
    if not message.picoseconds_per_sample:
        return None
    overhead, slope = message.overhead_nanoseconds / 1e9, message.picoseconds_per_sample / 1e12
    if shape == LINE:
        return Affine(overhead, slope)
    return PiecewiseCost(tuple((x, overhead + w * slope, m * slope) for x, w, m in shape))


def checksum(plan: Sequence[int]) -> int:
    """Returns a 24-bit checksum of a step and its plan; others collide in 1 of 16 million cases."""
    return zlib.crc32(repr(tuple(plan)).encode()) % LIMB


def fingerprint(text: str) -> int:
    """Returns a 31-bit hash of a text, by which texts are compared as integer facts."""
    return zlib.crc32(text.encode()) & 0x7FFFFFFF
