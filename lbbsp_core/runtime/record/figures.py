r"""Figures of the steps of a run: how long workers wait, what balancing gains, what is hidden.

Everything that shows a figure takes it from here, so that it means the same everywhere. For worker
i of N with the busy time :math:`b_i` in a step that takes s seconds from barrier to barrier:

=========================  =================================================================
waiting                    :math:`\sum_i (\max_j b_j - b_i) \,/\, (N s)`: waiting for other workers
waiting and communication  :math:`\sum_i (s - b_i) \,/\, (N s)`: all that is not computing
speed-up                   :math:`(s - \max_j b_j + e) \,/\, s`, with the time e that the slowest
                           worker would be busy with even batches: at least, and at most, see
                           `lbbsp_core.runtime.record.even_batches`
hidden communication       :math:`h \,/\, s`, with the time h in which gradients are on their way
                           while the slowest computes; not hidden is :math:`s - \max_j b_j`
=========================  =================================================================

Figures of several steps are ratios of sums. Only regular steps count, if there are any. What all
workers must know alike is computed step by step, from exchanged numbers, by scalar operations.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from functools import reduce
from typing import Final, NamedTuple

from lbbsp_core.cost import Proportional
from lbbsp_core.runtime.record.even_batches import EvenBatches
from lbbsp_core.runtime.record.record import StepLine

RECENT: Final = 20
"""Number of steps over which figures of the recent past are computed."""

NOTICEABLE: Final = 0.01
"""Least share of the time from which on hidden communication is shown."""


class Figures(NamedTuple):
    """Figures of some steps.

    Args:
        waiting: Share of the workers' time in which they wait for slower workers, in [0, 1).
        waiting_and_communication: Share in which they do not compute, in [0, 1).
        speedup: Ratio of the time of these steps with even batches to their time, > 0: the least
            estimate.
        hidden_communication: Share in which gradients are on their way while the slowest worker
            computes.
        speedup_at_most: The largest estimate of the speed-up.
    """

    waiting: float
    waiting_and_communication: float
    speedup: float
    hidden_communication: float = 0.0
    speedup_at_most: float = 1.0

    @property
    def communication(self) -> float:
        """Share in which communication is not hidden: from the slowest worker's arrival on."""
        return self.waiting_and_communication - self.waiting

    @property
    def hides(self) -> bool:
        """Whether enough communication is hidden to show it."""
        return self.hidden_communication >= NOTICEABLE

    @property
    def hidden_part(self) -> float:
        """Hidden communication / all communication, in [0, 1]; 0 without any."""
        both = self.hidden_communication + self.communication
        return self.hidden_communication / both if both > 0 else 0.0


class StepTimes(NamedTuple):
    """Seconds of a step, or sums over several.

    Args:
        seconds: Time from barrier to barrier.
        busy: Mean busy time of the workers.
        slowest: Busy time of the slowest worker.
        even: Busy time that the slowest worker would have had with even batches, at least.
        hidden: Time in which gradients were on their way while the slowest worker computed.
        even_at_most: The same as `even`, at most.
    """

    seconds: float
    busy: float
    slowest: float
    even: float
    hidden: float
    even_at_most: float

    @classmethod
    def of(cls, line: StepLine) -> StepTimes:
        """Returns the times of a step."""
        busy, slowest = line.busy_seconds, max(line.busy_seconds)
        even, most = line.even_seconds, line.even_seconds_at_most
        if even is None:
            even, most = EvenBatches([Proportional()] * len(busy)).seconds(line, [0.0] * len(busy))
        most = even if most is None else most  # records of earlier versions have one estimate
        seconds, hidden = max(line.wall_seconds, slowest), line.hidden_seconds
        return cls(seconds, sum(busy) / len(busy), slowest, even, hidden, most)

    @property
    def figures(self) -> Figures | None:
        """Figures of these steps; None if no time was measured."""
        if not self.slowest > 0:
            return None
        return Figures(
            (self.slowest - self.busy) / self.seconds,
            (self.seconds - self.busy) / self.seconds,
            (self.seconds - self.slowest + self.even) / self.seconds,
            self.hidden / self.seconds,
            (self.seconds - self.slowest + self.even_at_most) / self.seconds,
        )


def total(times: Iterable[StepTimes]) -> StepTimes:
    """Returns sums of times."""
    sums = NOTHING
    for step_times in times:
        sums = StepTimes(*(a + b for a, b in zip(sums, step_times, strict=True)))
    return sums


NOTHING: Final = StepTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Sums(NamedTuple):
    """Times of several steps: the regular ones count, or the others if none is regular."""

    regular: StepTimes = NOTHING
    irregular: StepTimes = NOTHING

    @property
    def figures(self) -> Figures | None:
        """Figures of these steps; None if no time was measured."""
        return self.regular.figures or self.irregular.figures

    def plus(self, line: StepLine) -> Sums:
        """Returns the sums with a further step."""
        times = StepTimes.of(line)
        if line.is_regular:
            return self._replace(regular=total((self.regular, times)))
        return self._replace(irregular=total((self.irregular, times)))


def figures_of(lines: Iterable[StepLine]) -> Figures | None:
    """Returns the figures of steps: of the regular ones, or of all if none is regular.

    Example:
        >>> line = StepLine(step=0, sizes=(4, 8), busy_seconds=(1.0, 0.5), wall_seconds=1.25,
        ...                 predicted_seconds=(None, None), excluded=(), even_seconds=1.5,
        ...                 even_seconds_at_most=1.75, hidden_seconds=0.25)
        >>> figures_of([line])  # doctest: +NORMALIZE_WHITESPACE
        Figures(waiting=0.2, waiting_and_communication=0.4, speedup=1.4, hidden_communication=0.2,
                speedup_at_most=1.6)
        >>> figures_of([line]).hidden_part
        0.5
    """
    return reduce(Sums.plus, lines, Sums()).figures


def predicted_over_measured(lines: Iterable[StepLine], rank: int) -> float | None:
    """Returns predicted / measured busy time of a worker, over the steps with a prediction."""
    pairs = [(line.predicted_seconds[rank], line.busy_seconds[rank]) for line in lines]
    known_pairs = [(predicted, busy) for predicted, busy in pairs if predicted is not None]
    measured = sum(busy for _, busy in known_pairs)
    return sum(predicted for predicted, _ in known_pairs) / measured if measured > 0 else None


class TimesSoFar:
    """Sums over the steps of a run since the number of workers last changed.

    A step that is repeated after a restart counts once: its last attempt.
    """

    def __init__(self) -> None:
        self._numbers, self._workers = array("q"), array("q")  # of each step
        self._sums = array("d")  # after each step: regular, irregular

    @property
    def figures(self) -> Figures | None:
        """Figures of these steps; None before the first one."""
        return self._total().figures

    def add(self, line: StepLine) -> None:
        """Adds a step."""
        kept, workers = bisect_left(self._numbers, line.step), len(line.sizes)
        del self._numbers[kept:], self._workers[kept:], self._sums[kept * 2 * len(NOTHING) :]
        before = self._total() if self._workers[-1:] == array("q", [workers]) else Sums()
        for times in before.plus(line):
            self._sums.extend(times)
        self._numbers.append(line.step)
        self._workers.append(workers)

    def _total(self) -> Sums:
        last = self._sums[-2 * len(NOTHING) :]
        regular, irregular = last[: len(NOTHING)], last[len(NOTHING) :]
        return Sums(StepTimes(*regular), StepTimes(*irregular)) if last else Sums()


class RunningFigures:
    """Figures of the recent steps and of an epoch, kept up to date step by step.

    Before the first measured step, no worker has waited and nothing was gained.
    """

    def __init__(self) -> None:
        self._steps: deque[StepTimes] = deque(maxlen=RECENT)  # regular ones
        self._irregular = NOTHING  # times of the last one
        self._epoch = Sums()
        self._first = 0  # step of the epoch

    @property
    def recent(self) -> Figures:
        """Figures of the last `RECENT` regular steps."""
        return total(self._steps).figures or self._irregular.figures or Figures(0.0, 0.0, 1.0)

    @property
    def epoch(self) -> Figures:
        """Figures of the steps since `begin_epoch`."""
        return self._epoch.figures or self.recent

    def begin_epoch(self, step: int) -> None:
        """Starts an epoch with a step; steps before it may still be added."""
        self._first, self._epoch = step, Sums()

    def add(self, line: StepLine) -> None:
        """Adds a step."""
        if line.step >= self._first:
            self._epoch = self._epoch.plus(line)
        if line.is_regular:
            self._steps.append(StepTimes.of(line))
        else:
            self._irregular = StepTimes.of(line)
