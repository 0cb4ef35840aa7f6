r"""Estimate of how long the slowest worker of each step would be busy with an even batch.

Worker i would need :math:`b_i (w_i(e) + \kappa_i) / (w_i(x_i) + \kappa_i)` seconds for the even
batch :math:`e = X / N`, where :math:`\kappa_i` is the part of its time that does not depend on the
batch. A run that has seen nearly one batch size says nothing about it, and without an overhead even
batches would take up to twice as long as with a large one. The estimate is therefore a range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from lbbsp_core.cost import Cost
from lbbsp_core.runtime.record.record import StepLine

BELIEVED: Final = 0.5
"""Largest overhead of a batch that is believed without evidence, in terms of an even batch."""

_CLEAR: Final = 4.0
"""Standard errors from which on a slope counts as known."""

_RELATED: Final = 0.3
"""Correlation of the errors of consecutive steps from which on the speed counts as changing."""

_ERRORS: Final = 2.0
"""Standard errors on both sides of a slope that is known: an interval of about 95 %."""


class Squares(NamedTuple):
    """Sums of squares and of products of work and busy seconds."""

    work: float = 0.0
    products: float = 0.0
    seconds: float = 0.0

    def plus(self, work: float, products: float, seconds: float) -> Squares:
        """Returns the sums with a further step."""
        return Squares(self.work + work, self.products + products, self.seconds + seconds)

    def slope(self, degrees: int) -> tuple[float, float]:
        """Returns the slope of least squares, and its standard error by the degrees of freedom."""
        slope = self.products / self.work
        residuals = max(self.seconds - slope * self.products, 0.0)
        return slope, math.sqrt(residuals / degrees / self.work)


class Fit(NamedTuple):
    """Least squares of busy seconds by work, of one worker: means, and sums of squares about them.

    Sums are updated by Welford's method, with scalar operations that round alike everywhere. The
    errors are those of each step by the fit of those before it. The changes are those from one step
    to the next.
    """

    steps: int = 0
    work: float = 0.0
    seconds: float = 0.0
    squares: Squares = Squares()
    error: float = 0.0
    error_squares: float = 0.0
    error_products: float = 0.0
    last: tuple[float, float] = (0.0, 0.0)
    changes: Squares = Squares()

    def plus(self, work: float, seconds: float) -> Fit:
        """Returns the fit with a further step."""
        steps, more, longer = self.steps + 1, work - self.work, seconds - self.seconds
        mean, mean_seconds = self.work + more / steps, self.seconds + longer / steps
        slope = self.squares.products / self.squares.work if self.squares.work > 0 else 0.0
        error = longer - slope * more
        left, right = work - mean, seconds - mean_seconds
        change, by = (work - self.last[0], seconds - self.last[1]) if self.steps else (0.0, 0.0)
        return Fit(
            *(steps, mean, mean_seconds),
            self.squares.plus(more * left, more * right, longer * right),
            error if self.steps else 0.0,
            self.error_squares + error**2,  # the first one, a whole step, outweighs small ones
            self.error_products + error * self.error,
            (work, seconds),
            self.changes.plus(change**2, change * by, by**2),
        )

    def overheads(self, least: float, most: float) -> tuple[float, float]:
        """Returns the smallest and the largest overhead, in samples, by the slope's interval.

        They are `least` and `most` where it is not clear: batches have hardly changed, or the speed
        has, and with it the batches. Those of a worker that has become slow are small and take as
        long, and a fit attributes that to an overhead. The errors of consecutive steps then
        resemble each other. If steps take as long after each change of the batch, too, there may
        also be no limit: of speeds that batches follow, and of an overhead, that looks the same.
        """
        if self.steps < 3 or self.squares.work <= 1e-6 * self.work**2:
            return least, most
        slope, error = self.squares.slope(self.steps - 2)
        if slope > _CLEAR * error and self.error_products <= _RELATED * self.error_squares:
            return self._overhead(slope + _ERRORS * error), self._overhead(slope - _ERRORS * error)
        slope, error = self.changes.slope(self.steps - 2)
        return least, math.inf if self._overhead(slope + _CLEAR * error) > most else most

    def _overhead(self, slope: float) -> float:
        return max(self.seconds / slope - self.work, 0.0) if slope > 0 else math.inf


class EvenBatches:
    """Estimates the busy time of the slowest worker with even batches, from below and above.

    The overhead of each worker is between the ends of a `Fit` of all steps that count. While that
    shows none, it is between the one by which the worker forecasts, which starts from none and is
    learned slowly, and half an even batch, the largest one that plans assume; or the one that was
    given, by a profile.

    Args:
        costs: Cost of each worker, by rank, of which the marginal work counts.
        given: Overhead of each worker in samples that was given; 0: none.
    """

    def __init__(self, costs: Sequence[Cost], given: Sequence[float] = ()) -> None:
        self._costs, self._given = costs, given or (0.0,) * len(costs)
        self._fits = [Fit()] * len(costs)
        self._even = 0.0
        self._there = [0.0] * len(costs)  # work of an even batch, by rank

    def seconds(self, line: StepLine, known: Sequence[float]) -> tuple[float, float]:
        """Learns from a step, and returns the smallest and the largest estimate for it.

        Args:
            line: Step, the next one.
            known: Overhead of each worker by its own forecast, in samples; 0 if it knows of none.
        """
        even, least, most = sum(line.amounts) / len(line.amounts), 0.0, 0.0
        if even != self._even:
            self._even = even
            self._there = [_marginal(cost, even) for cost in self._costs]
        for rank, cost in enumerate(self._costs):
            busy, there = line.busy_seconds[rank], self._there[rank]
            here = _marginal(cost, line.amounts[rank])
            if not (line.short or rank in line.excluded) and here > 0 < busy:
                self._fits[rank] = self._fits[rank].plus(here, busy)
            overheads = self._fits[rank].overheads(
                known[rank], self._given[rank] or BELIEVED * even
            )
            times = [
                busy * (there + overhead) / (here + overhead)
                if 0 < here + overhead < math.inf
                else busy
                for overhead in overheads
            ]
            least, most = max(least, min(times)), max(most, max(times))
        return least, most


def _marginal(cost: Cost, work: float) -> float:
    return float(cost.effective_samples(work)) - float(cost.effective_samples(0))
