"""Pace of a worker in main parts and claimed parts, and what its parts have cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

SLOW_CLAIM_SECONDS: Final = 1.0
"""Time of a claim after which work is no longer shared."""

PART_SECONDS: Final = 0.0025
CLAIM_SECONDS: Final = 0.001
"""Overhead of a part, and time of a claim, that are assumed before one has been measured."""

_MEMORY: Final = 50  # parts that count in the fit of `PartCosts`
_BAND: Final = 0.25  # its width on each side, relative to the line


class Pace(NamedTuple):
    """How fast a worker is; overheads are slower with it, and hence counted in samples (rule 5).

    Args:
        seconds_per_sample: Seconds of a further sample, > 0.
        step_overhead: Overhead of a step, in samples that take as long.
        part_overhead: Overhead of a claimed part besides its claim, in samples.
    """

    seconds_per_sample: float
    step_overhead: float = 0.0
    part_overhead: float = 0.0

    def main(self, samples: float) -> float:
        """Returns the seconds of a main part."""
        return (self.step_overhead + samples) * self.seconds_per_sample

    def part(self, samples: float) -> float:
        """Returns the seconds of a claimed part."""
        return (self.part_overhead + samples) * self.seconds_per_sample


def together_seconds(sizes: Sequence[int], paces: Sequence[Pace]) -> float:
    """Returns the seconds of a step in which nobody waits, and nothing is claimed."""
    work = sum(sizes) + sum(pace.step_overhead for pace in paces)
    return work / sum(1 / pace.seconds_per_sample for pace in paces)


class PartCosts(NamedTuple):
    """Overhead of a worker's parts, fitted to the times of those that it has computed.

    A part of n samples takes ``(n + o) s`` seconds, where s is the pace of the main part of the
    same step, so that contention cancels out. The fit is a straight line of ``time / (s n)`` by
    ``1 / n``, through 1, whose slope is the overhead o in samples: relative errors count alike.
    Recent parts weigh more. Where contention begins or ends within a step, times are far from the
    line, and count as if they were at the edge of a band around it (as in Huber's regression).

    Args:
        slope: Slope of the line, >= 0.
        weight: Number of parts, up to a limit; 0: the slope is not known.
        xx: Running mean square of ``1 / n``.

    Example:
        >>> costs = PartCosts()
        >>> for samples in (20, 10, 5, 20, 10, 5) * 5:
        ...     costs = costs.after(samples, (samples + 3) * 0.01, 0.01)
        >>> round(costs.overhead(0.01), 3)
        3.0
    """

    slope: float = 0.0
    weight: float = 0.0
    xx: float = 0.0

    def after(self, samples: int, seconds: float, seconds_per_sample: float) -> PartCosts:
        """Returns the fit after a part of some samples, by the pace of the main part.

        Args:
            samples: Size of the part.
            seconds: Its time, without the claim.
            seconds_per_sample: Pace of the main part.
        """
        x, y = 1 / samples, seconds / (samples * seconds_per_sample)
        line = 1 + self.slope * x
        error = min(max(y - line, -_BAND * line), _BAND * line)
        weight = min(self.weight + 1, _MEMORY)
        xx = self.xx + (x * x - self.xx) / weight
        return PartCosts(max(0.0, self.slope + x * error / (weight * xx)), weight, xx)

    def overhead(self, seconds_per_sample: float) -> float:
        """Returns the overhead of a part, in samples of this pace; 0 if the pace is not known."""
        if self.weight:
            return self.slope
        return PART_SECONDS / seconds_per_sample if seconds_per_sample else 0.0
