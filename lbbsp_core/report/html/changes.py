"""Change points of a noisy series: since when a worker is slower."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.stats import norm, rankdata

from lbbsp_core.report.html.table import Floats

MIN_LENGTH = 8
"""Smallest number of values of a level."""

_SIGNIFICANCE = 1e-3
_MIN_RATIO = 1.25
"""Levels whose medians differ by a smaller factor count as one."""


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
    found = levels(values)
    higher = [level for level in found[:-1] if level.median >= least * found[-1].median]
    if not higher:
        return None
    return Drop(max(level.median for level in higher) / found[-1].median, higher[-1].stop)


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
    found: list[Level] = []
    for start, stop in _segments(values):
        level = Level(start, stop, float(np.median(values[start:stop])))
        while found and _are_one(found[-1], level):
            earlier = found.pop()
            start = earlier.start
            level = Level(start, stop, float(np.median(values[start:stop])))
        found.append(level)
    return found


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


def _are_one(one: Level, other: Level) -> bool:
    low, high = sorted((one.median, other.median))
    return high < _MIN_RATIO * low
