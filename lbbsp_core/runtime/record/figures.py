r"""Figures of the steps of a run while it runs: how long workers wait, and what balancing gains.

For worker i of N with the work :math:`x_i` and the busy time :math:`b_i` in a step:

===================  ===================================================================
waiting              :math:`\sum_i (\max_j b_j - b_i) \,/\, (N \max_j b_j)`
even seconds         :math:`\max_i b_i \, c_i(X / N) / c_i(x_i)`: the slowest busy time with even
                     batches, at the costs :math:`c_i` that are forecast after the step
speed-up             even seconds / :math:`\max_i b_i`
===================  ===================================================================

Figures of several steps are ratios of sums. Only regular steps count, if there are any. They are
computed from exchanged numbers by scalar operations, and are the same on all workers.

The speed-up is an estimate. It knows the time that a batch of any size takes as far as the changes
of a worker's batch have shown it, or its profile. Without a forecast, costs are proportional to the
batch. Communication is not in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from lbbsp_core.cost import Cost
from lbbsp_core.runtime.record.record import StepLine, counted

RECENT: Final = 20
"""Number of steps over which figures of the recent past are computed."""


class Figures(NamedTuple):
    """Figures of some steps.

    Args:
        waiting: Share of the workers' time spent waiting for the slowest one, in [0, 1).
        speedup: Estimated ratio of the time of even batches to the time of these ones, > 0.
    """

    waiting: float
    speedup: float


class StepTimes(NamedTuple):
    """Seconds of a step, or sums over several.

    Args:
        waited: Mean over the workers of the time until the slowest one was done.
        slowest: Busy time of the slowest worker.
        even: Busy time that the slowest worker would have had with even batches.
    """

    waited: float
    slowest: float
    even: float

    @classmethod
    def of(cls, line: StepLine) -> StepTimes:
        """Returns the times of a step."""
        busy, slowest = line.busy_seconds, max(line.busy_seconds)
        even = line.even_seconds
        if even is None:
            even = even_seconds(line.amounts, busy, [None] * len(busy))
        return cls(slowest - sum(busy) / len(busy), slowest, even)

    @property
    def figures(self) -> Figures | None:
        """Figures of these steps; None if no busy time was measured."""
        if not self.slowest > 0:
            return None
        return Figures(self.waited / self.slowest, self.even / self.slowest)


def even_seconds(
    amounts: Sequence[float], busy_seconds: Sequence[float], costs: Sequence[Cost | None]
) -> float:
    """Estimates the busy time of the slowest worker with even batches.

    A cost of None is unknown, and taken as proportional.

    Example:
        >>> from lbbsp_core import Affine
        >>> even_seconds((2, 6), (2.0, 3.0), (Affine(1.0, 0.5), None))  # (1 + 2) / (1 + 1) * 2.0
        3.0
    """
    even = sum(amounts) / len(amounts)
    workers = zip(amounts, busy_seconds, costs, strict=True)
    return max((busy * _ratio(cost, even, x) for x, busy, cost in workers if x > 0), default=0.0)


def _ratio(cost: Cost | None, even: float, amount: float) -> float:
    """Returns the cost of an even batch in terms of that of the batch that a worker had."""
    seconds = 0.0 if cost is None else float(cost(amount))
    if cost is None or not seconds > 0:
        return even / amount
    return float(cost(even)) / seconds


def total(times: Iterable[StepTimes]) -> StepTimes:
    """Returns sums of times."""
    sums = [0.0, 0.0, 0.0]
    for each in times:
        sums = [a + b for a, b in zip(sums, each, strict=True)]
    return StepTimes(*sums)


def figures_of(lines: Iterable[StepLine]) -> Figures | None:
    """Returns the figures of steps: of the regular ones, or of all if none is regular.

    Example:
        >>> line = StepLine(step=0, sizes=(4, 8), busy_seconds=(1.0, 0.5), wall_seconds=1.0,
        ...                 predicted_seconds=(None, None), excluded=())
        >>> figures_of([line])
        Figures(waiting=0.25, speedup=1.5)
    """
    return total(map(StepTimes.of, counted(lines))).figures


class RunningFigures:
    """Figures of the recent steps and of an epoch, kept up to date step by step.

    Before the first measured step, no worker has waited and nothing was gained: 0 and 1.
    """

    def __init__(self) -> None:
        self._steps: deque[StepTimes] = deque(maxlen=RECENT)
        self._epoch = _NOTHING
        self._irregular = _NOTHING  # steps of the epoch that are counted only if no other one is
        self.recent = Figures(0.0, 1.0)
        """Figures of the last `RECENT` regular steps."""

    @property
    def epoch(self) -> Figures:
        """Figures of the steps since `begin_epoch`."""
        return self._epoch.figures or self._irregular.figures or self.recent

    def begin_epoch(self) -> None:
        """Forgets the steps of the last epoch."""
        self._epoch = self._irregular = _NOTHING

    def add(self, line: StepLine) -> None:
        """Adds a step."""
        times = StepTimes.of(line)
        if not line.is_regular:
            self._irregular = total((self._irregular, times))
            if self._steps:
                return
            self.recent = times.figures or self.recent
            return
        self._epoch = total((self._epoch, times))
        self._steps.append(times)
        self.recent = total(self._steps).figures or self.recent


_NOTHING: Final = StepTimes(0.0, 0.0, 0.0)
