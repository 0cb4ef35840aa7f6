"""A step with a reserve: which samples are held back, and how many a worker claims of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from lbbsp_core.policy import Sizes

FRACTIONS: Final = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80)
"""Fractions f among which `Hindsight` chooses, in percent."""

AUTO: Final = "auto"

_MOST_PERCENT: Final = FRACTIONS[-1]


def mode_of(share_work: bool | str | float) -> int | str:
    """Returns how steps share work: a fraction of each step in percent, or `AUTO`.

    Args:
        share_work: True or ``"auto"`` for `AUTO`, False for 0, or a fraction in [0.01, 0.8].

    Raises:
        ValueError: It is something else; names the value and the remedy.

    Example:
        >>> mode_of(True), mode_of(False), mode_of(0.4)
        ('auto', 0, 40)
    """
    if isinstance(share_work, bool) or share_work == AUTO:
        return AUTO if share_work else 0
    percent = 0
    if isinstance(share_work, int | float) and math.isfinite(share_work):
        percent = round(100 * share_work)
    if not 0 < percent <= _MOST_PERCENT:
        raise ValueError(
            'share_work must be True, False, "auto", or a fraction of each step from 0.01 to '
            f"{_MOST_PERCENT / 100}, got {share_work!r}: give one of these"
        )
    return percent


class Split(NamedTuple):
    """Plan of a step with a reserve, in samples.

    Args:
        mains: Main part of each worker, by rank; it starts the step with it.
        reserve: Samples that follow those of all mains.
    """

    mains: Sizes
    reserve: int


def split(sizes: Sequence[int], percent: int, granularity: int = 1) -> Split:
    """Divides a plan into main parts and a reserve of about `percent` of it.

    Main parts are multiples of the granularity, except that of a worker with a remainder, and >= 1
    for a worker that has samples.

    Example:
        >>> split((24, 48, 48), 40)
        Split(mains=(15, 29, 29), reserve=47)
        >>> split((3, 1), 80)
        Split(mains=(1, 1), reserve=2)
    """
    kept = 100 - percent
    grains = (-(-size * kept // (100 * granularity)) * granularity for size in sizes)
    mains = tuple(min(size, grain) for size, grain in zip(sizes, grains, strict=True))
    return Split(mains, sum(sizes) - sum(mains))


class Claims:
    """One worker's claims on the reserve of a step: how many samples it asks for, and gets.

    Args:
        sizes: The plan, by rank. By it all workers are expected to need the same time.
        mains: Main parts, by rank.
        rank: Number of this worker.
        step_seconds: Seconds that the step is expected to take.
        claim_seconds: Seconds from a claim to its answer.
        part_overhead: See `Pace`; of this worker.
        granularity: Claims are multiples of it, in samples.

    Attributes:
        samples: Samples that the worker has got.
        parts: Number of parts in which it has got them.

    Example:
        >>> claims = Claims((50, 50), mains=(30, 30), rank=0, step_seconds=0.5)
        >>> claims.next_size(0.3), claims.take(start=0, size=10, seconds=0.3)
        (10, (0, 10))
        >>> claims.next_size(0.375), claims.take(start=35, size=5, seconds=0.4)  # 25 are of another
        (5, (35, 40))
        >>> claims.samples, claims.parts, claims.is_empty
        (15, 2, True)
    """

    def __init__(
        self,
        sizes: Sequence[int],
        mains: Sequence[int],
        rank: int,
        step_seconds: float,
        claim_seconds: float = 0.0,
        part_overhead: float = 0.0,
        granularity: int = 1,
    ) -> None:
        total = sum(sizes)
        self._reserve, self._granularity = total - sum(mains), granularity
        self._main, self._others = mains[rank], (total - sizes[rank]) / step_seconds
        fraction = self._reserve / total
        self._fraction_seconds = fraction * step_seconds
        self._claim_seconds, self._part_overhead = claim_seconds, part_overhead
        # Nobody claims before the main parts should be done.
        self._seen, self._seen_at = 0, (1 - fraction) * step_seconds
        self.samples = self.parts = 0

    @property
    def is_empty(self) -> bool:
        """Whether the reserve is known to be empty."""
        return self._seen >= self._reserve

    def next_size(self, seconds: float) -> int:
        """Returns the samples to claim now, >= 1, `seconds` after the start of the step."""
        done = max(self._main + self.samples, 1)
        speed = done / max(seconds, 1e-9)  # its own, in this step
        taken = self._others * max(0.0, seconds - self._seen_at)
        left = max(0.0, self._reserve - self._seen - taken)
        overhead = self._claim_seconds + self._part_overhead / speed
        least = speed * shortest_part(self._fraction_seconds, overhead)
        grains = max(left * speed / (speed + self._others) / 2, least) / self._granularity
        return max(1, int(grains)) * self._granularity

    def take(self, start: int, size: int, seconds: float) -> tuple[int, int]:
        """Returns the part that a claim has got: positions of its first sample, and after its last.

        Args:
            start: Value of the counter before the claim.
            size: Samples that were claimed.
            seconds: Time of the answer, after the start of the step.
        """
        begin, end = min(start, self._reserve), min(start + size, self._reserve)
        self._seen, self._seen_at = end, seconds
        self.samples += end - begin
        self.parts += end > begin
        return begin, end


def shortest_part(reserve_seconds: float, overhead_seconds: float) -> float:
    """Returns the seconds that a part should take at least, ``sqrt(2 o f T)``."""
    return math.sqrt(2 * overhead_seconds * reserve_seconds)
