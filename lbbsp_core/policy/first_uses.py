"""First uses of batch sizes: no measurements of a speed, and a price of plans with new sizes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from lbbsp_core.cost import Cost
from lbbsp_core.policy.constraints import BatchConstraints, Sizes

_REMEMBERED: Final = 7  # first uses of a worker
_ENOUGH: Final = 2  # of them tell whether they are free
_NEGLIGIBLE: Final = 0.1  # of the predicted time
_OUTLYING, _PATIENCE = 5.0, 3  # as those of `OutlierFilter`
_NEAREST: Final = 16  # sizes of a worker in the search of a plan


@dataclass(frozen=True, slots=True)
class FirstUses:
    """What is known of one worker's first uses of batch sizes; the same on all workers.

    The first batch of a size may take longer than the next ones: on a GPU, libraries try their
    algorithms for each new shape, allocators grow and graphs are compiled. Ours: such a step says
    nothing about speed, and its extra time is what a plan with a new size costs.

    A first use counts as a measurement if it takes at most a tenth longer than predicted, or if
    two or more were seen, and the usual extra time is at most that: on CPUs a worker is then slower
    for another reason, unless it takes five times as long as predicted. After three steps in a row
    that do not count, the next one counts without the usual extra time, so that a worker whose size
    is new in every step is still learned from.

    Args:
        sizes: Batch sizes that the worker has run since it started, or has traced its step anew.
        extra: Extra seconds of its latest first uses, compared with the next step of the same
            size, or else with the forecast.
        in_row: Latest steps, all first uses, that did not count.
        largest: Largest batch of a plan that it has run since it started.
        settled_seconds: Busy seconds since the step in which that was new, up to a second.
        latest: A first use whose next step is still to come: its size, its busy seconds, and its
            extra seconds by the forecast.

    Example:
        >>> worker = FirstUses().after(8, 1.0, None)
        >>> worker.measured(8, 1.0, 1.0), worker.measured(9, 1.6, 1.1)
        (1.0, None)
        >>> worker.after(9, 1.5, 1.1).after(9, 1.25, 1.1).extra
        (0.25,)
    """

    sizes: frozenset[int] = frozenset()
    extra: tuple[float, ...] = ()
    in_row: int = 0
    largest: int = 0
    settled_seconds: float = 0.0
    latest: tuple[int, float, float] | None = None

    @property
    def extra_seconds(self) -> float:
        """Usual extra time of a first use, >= 0; 0 before one has been seen.

        The lower quartile: where they are free, times differ in both directions.
        """
        return max(0.0, sorted(self.extra)[len(self.extra) // 4]) if self.extra else 0.0

    def measured(self, size: int, busy_seconds: float, forecast: float | None) -> float | None:
        """Returns the seconds of a step that say how fast the worker is; None: it does not.

        Args:
            size: Batch size of the step, in samples.
            busy_seconds: Busy time of the step.
            forecast: Predicted busy time; None if there is none.
        """
        if size in self.sizes:
            return busy_seconds
        if not 0 < busy_seconds < math.inf:
            return None
        usual = self.extra_seconds
        if forecast is not None and busy_seconds <= _OUTLYING * forecast:
            expected = usual if len(self.extra) >= _ENOUGH else math.inf
            if min(expected, busy_seconds - forecast) <= _NEGLIGIBLE * forecast:
                return busy_seconds
        if self.in_row < _PATIENCE or busy_seconds <= usual:
            return None
        return busy_seconds - usual

    def after(
        self, size: int, busy_seconds: float, forecast: float | None, *, excluded: bool = False
    ) -> FirstUses:
        """Returns what is known after a step.

        Args:
            size: Batch size of the step, in samples.
            busy_seconds: Busy time of the step.
            forecast: Predicted busy time; None if there is none.
            excluded: Whether the step contains other work.
        """
        if size in self.sizes and self.latest is None and not self.in_row:
            return self  # as in most steps
        is_valid = 0 < busy_seconds < math.inf and not excluded
        extra, latest = self.extra, self.latest
        if latest is not None and (is_valid or size != latest[0]):
            more = latest[1] - busy_seconds if size == latest[0] else latest[2]
            extra, latest = (*extra, more)[-_REMEMBERED:], None
        if size in self.sizes:
            return replace(self, extra=extra, in_row=0, latest=latest)
        if is_valid and forecast is not None:
            latest = size, busy_seconds, busy_seconds - forecast
        missed = self.measured(size, busy_seconds, forecast) is None
        in_row = self.in_row + 1 if missed else 0
        return replace(self, sizes=self.sizes | {size}, extra=extra, in_row=in_row, latest=latest)

    def ran(self, planned: int, busy_seconds: float) -> FirstUses:
        """Returns what is known of the largest batch after a step.

        Args:
            planned: Batch of the step's plan, in mean samples of the data set.
            busy_seconds: Busy time of the step.
        """
        if planned > self.largest:
            return replace(self, largest=planned, settled_seconds=0.0)
        if self.settled_seconds >= 1:
            return self
        return replace(self, settled_seconds=self.settled_seconds + busy_seconds)

    def retraced(self) -> FirstUses:
        """Returns what is known once the worker's step has been compiled anew, for no size yet."""
        return replace(self, sizes=frozenset(), in_row=0)


def extra_seconds(workers: Sequence[FirstUses], sizes: Sizes) -> float:
    """Returns by how much the first step of a plan takes longer than the next ones, in seconds."""
    pairs = zip(workers, sizes, strict=False)
    return max((uses.extra_seconds for uses, x in pairs if x not in uses.sizes), default=0.0)


def plan_of_used_sizes(
    workers: Sequence[FirstUses],
    constraints: BatchConstraints,
    costs: Sequence[Cost],
    near: Sizes,
    below: float = math.inf,
) -> Sizes | None:
    """Returns a best plan in which all workers have sizes that they have run.

    Of each worker it considers the sizes nearest to those of a plan. Of all plans of these none has
    a faster slowest worker; where X is no multiple of the granularity, there may be a better one.
    Returns None if there is no such plan in which the slowest worker takes less than `below`
    seconds.
    """
    grain = math.gcd(constraints.global_batch_size, constraints.granularity)
    choices = []
    for uses, bounds, cost, x in zip(workers, constraints.limits, costs, near, strict=True):
        usable = (size for size in uses.sizes if bounds.allow(size) and size % grain == 0)
        nearest = sorted((abs(size - x), size) for size in usable)[:_NEAREST]
        choices.append(sorted((float(cost(size)), size) for _, size in nearest))
    ends = sorted({seconds for sizes in choices for seconds, _ in sizes if seconds < below})

    @cache
    def plan_within(most: float) -> Sizes | None:
        within = [[x for seconds, x in sizes if seconds <= most] for sizes in choices]
        return _with_sum(within, constraints.global_batch_size)

    if not ends or plan_within(ends[-1]) is None:  # as most often
        return None
    best = plan_within(ends[bisect_left(ends, True, key=lambda end: bool(plan_within(end)))])
    return best if best is not None and constraints.allow(best) else None


def _with_sum(choices: Sequence[Sequence[int]], total: int) -> Sizes | None:
    """Returns one number of each sequence such that their sum is `total`; None: impossible."""
    sums = [1]  # bit k of entry i: whether the first i sequences can have the sum k
    for numbers in choices:
        reached = 0
        for number in numbers:
            reached |= sums[-1] << number
        sums.append(reached & ((2 << total) - 1))
    if not sums[-1] >> total:
        return None
    chosen: list[int] = []
    for numbers, before in zip(reversed(choices), reversed(sums[:-1]), strict=True):
        remainder = total - sum(chosen)
        chosen.append(next(x for x in numbers if x <= remainder and before >> (remainder - x) & 1))
    return tuple(reversed(chosen))
