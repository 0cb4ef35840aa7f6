"""Speeds of the workers in a record, and when they have changed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.stats import norm, rankdata

from lbbsp_core.cost import Affine, Cost, Profile, Proportional, Saturating
from lbbsp_core.cost.online import CostShape
from lbbsp_core.runtime.record.table import Floats, StepTable

_FORMS = {form.__name__: form for form in (Proportional, Affine, Saturating, Profile)}

MIN_LENGTH = 8
"""Smallest number of values of a level."""
_SIGNIFICANCE = 1e-3
_MIN_RATIO = 1.25
"""Levels whose medians differ by a smaller factor count as one."""


def prior_cost(text: str | None) -> Cost:
    """Reads the repr of a cost; another text is a proportional cost.

    Only the forms of `lbbsp_core.cost` with literals as arguments are known, nothing is evaluated.

    Example:
        >>> prior_cost("Affine(overhead_seconds=0.5, seconds_per_sample=0.1)").effective_samples(0)
        5.0
        >>> prior_cost("Mine(exit())")
        Proportional(samples_per_second=1.0)
    """
    try:
        call = ast.parse(text or "", mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            return _FORMS[call.func.id](**arguments)
    except (ValueError, SyntaxError, KeyError, TypeError, ArithmeticError, RecursionError,
            MemoryError):  # fmt: skip
        pass
    return Proportional(1.0)


def speeds_of(table: StepTable) -> Floats:
    """Returns the speeds of the workers, shape ``(n, N)``, as a change of the batch leaves them.

    These are work plus overhead / busy time, with the overhead that `CostShape` learns from the
    same steps, starting from the prior cost in the header.
    """
    prior = prior_cost(table.header.cost)
    shape = CostShape.from_cost(prior, table.header.global_batch_size, table.workers)
    columns = zip(table.amounts.T, table.busy.T, strict=True)
    overheads = [_overhead(shape, *column) for column in columns]
    cost = prior.at_speed(1.0)
    work = cost(table.amounts) - cost(0.0)
    return np.asarray((work + np.maximum(overheads, 1e-9)) / table.busy)


def _overhead(shape: CostShape, amounts: Floats, busy: Floats) -> float:
    """Returns the kappa that `CostShape` learns from the large changes of one worker's batch."""
    work = 2 * np.abs(np.diff(amounts)) / np.maximum(amounts[1:] + amounts[:-1], 1e-9)
    time = 2 * np.abs(np.diff(busy)) / (busy[1:] + busy[:-1])
    quiet = np.abs(work - time)[work < shape.min_change]
    least = max(shape.min_change, 3 * float(np.median(quiet)) if quiet.size else 0.0)
    state = shape.init()
    for k in np.flatnonzero(work >= least).tolist():
        state = shape.skip(state)
        for step in (k, k + 1):
            state = shape.learn(state, float(amounts[step]), float(busy[step]))
    return state.overhead


class Level(NamedTuple):
    """Part of a series in which its values stay at one level."""

    start: int  # index of the first value
    stop: int  # index after the last value
    median: float  # median of the values


class Drop(NamedTuple):
    """Difference between the last level of a series and higher ones before it."""

    ratio: float  # highest earlier level / last level
    start: int  # index at which the series left the higher levels for the last time


def lasting_drop(values: Floats, least: float) -> Drop | None:
    """Returns the drop to the last level; None if no level before was `least` times as high.

    Example:
        >>> lasting_drop(np.repeat([300.0, 150.0, 100.0], 50), 2)
        Drop(ratio=3.0, start=50)
    """
    all_levels = levels(values)
    higher = [level for level in all_levels[:-1] if level.median >= least * all_levels[-1].median]
    if not higher:
        return None
    return Drop(max(level.median for level in higher) / all_levels[-1].median, higher[-1].stop)


def levels(values: Floats) -> list[Level]:
    r"""Splits a series of positive values into levels, in order.

    Binary segmentation with a rank test: of all splits of n values into the first t and the rest,
    the one with the largest ``Z_t`` is taken,

    .. math::
        U_t = 2 \sum_{i \le t} rank_i - t (n + 1), \quad
        Z_t = |U_t| / \sqrt{t (n - t) (n + 1) / 3}

    if the largest of n normal numbers exceeds it with a probability below 0.001. ``U_t`` is the
    statistic of Pettitt. Divided by its standard deviation, it finds a change near an end as well
    as one in the middle (Hawkins and Deng). Ranks make it insensitive to outliers. Neighbouring
    levels whose medians differ by less than a quarter are merged.

    Example:
        >>> levels(np.array([10.0] * 20 + [5.0] * 20))
        [Level(start=0, stop=20, median=10.0), Level(start=20, stop=40, median=5.0)]

    References:
        A. N. Pettitt, "A non-parametric approach to the change-point problem", Applied Statistics
        28(2), 1979.

        D. M. Hawkins and Q. Deng, "A nonparametric change-point control chart", Journal of Quality
        Technology 42(2), 2010.
    """
    merged_levels: list[Level] = []
    for start, stop in _segments(values):
        level = Level(start, stop, float(np.median(values[start:stop])))
        while merged_levels and _are_one(merged_levels[-1], level):
            start = merged_levels.pop().start
            level = Level(start, stop, float(np.median(values[start:stop])))
        merged_levels.append(level)
    return merged_levels


def _segments(values: Floats) -> Iterator[tuple[int, int]]:
    """Yields the parts of a series that are not split further, in order."""
    pending = [(0, len(values))]
    while pending:
        start, stop = pending.pop()
        if stop - start >= 2 * MIN_LENGTH:
            at, probability = _split(values[start:stop])
            if probability < _SIGNIFICANCE:
                pending += [(start + at, stop), (start, start + at)]
                continue
        if stop > start:
            yield start, stop


def _split(values: Floats) -> tuple[int, float]:
    """Returns the most likely split of a series, and a bound of its probability by chance."""
    n = len(values)
    first = np.arange(1, n)
    statistic = np.abs(2 * np.cumsum(rankdata(values))[:-1] - first * (n + 1))
    statistic /= np.sqrt(first * (n - first) * (n + 1) / 3)
    possible = statistic[MIN_LENGTH - 1 : n - MIN_LENGTH]
    best = int(np.argmax(possible))
    return best + MIN_LENGTH, 2 * n * float(norm.sf(possible[best]))


def _are_one(level: Level, other: Level) -> bool:
    low, high = sorted((level.median, other.median))
    return high < _MIN_RATIO * low
