"""Change points of a noisy series: since when a worker is slower."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

from lbbsp_core.report.html.table import Floats

MIN_LENGTH = 8
"""Smallest number of values of a level."""

_SIGNIFICANCE = 1e-3
_MIN_RATIO = 1.25
"""Levels whose medians differ by a smaller factor count as one."""


class Level(NamedTuple):
    """Part of a series in which its values stay at one level.

    Args:
        start: Index of the first value.
        stop: Index after the last value.
        median: Median of the values.
    """

    start: int
    stop: int
    median: float


class Drop(NamedTuple):
    """Difference between the last level of a series and higher ones before it.

    Args:
        ratio: Highest earlier level / last level.
        start: Index at which the series left the higher levels for the last time.
    """

    ratio: float
    start: int


def lasting_drop(values: Floats, least: float) -> Drop | None:
    """Returns the drop to the last level; None if no level before was `least` times as high.

    Args:
        values: Series, as for `levels`.
        least: Smallest ratio of levels, > 1.

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

    Binary segmentation with Pettitt's rank test: of all splits of n values into the first t and
    the rest, the one with the largest ``|U_t|`` is taken,
    ``U_t = 2 \sum_{i \le t} rank_i - t (n + 1)``, if ``2 \exp(-6 U^2 / (n^3 + n^2))`` is below
    0.001. Ranks make it insensitive to outliers. Neighbouring levels whose medians differ by less
    than a quarter are merged.

    Args:
        values: Series, shape ``(n,)``, finite and > 0.

    Returns:
        The levels; none for an empty series.

    Example:
        >>> levels(np.array([10.0] * 20 + [5.0] * 20))
        [Level(start=0, stop=20, median=10.0), Level(start=20, stop=40, median=5.0)]

    References:
        A. N. Pettitt, "A non-parametric approach to the change-point problem", Applied Statistics
        28(2), 1979.
    """
    found: list[Level] = []
    shortest = max(MIN_LENGTH, len(values) // 50)
    for start, stop in _segments(values, 0, len(values), shortest):
        level = Level(start, stop, float(np.median(values[start:stop])))
        while found and _are_one(found[-1], level):
            earlier = found.pop()
            start = earlier.start
            level = Level(start, stop, float(np.median(values[start:stop])))
        found.append(level)
    return found


def _segments(values: Floats, start: int, stop: int, shortest: int) -> Iterator[tuple[int, int]]:
    size = stop - start
    if size >= 2 * shortest:
        at, probability = _pettitt(values[start:stop])
        if probability < _SIGNIFICANCE and shortest <= at <= size - shortest:
            yield from _segments(values, start, start + at, shortest)
            yield from _segments(values, start + at, stop, shortest)
            return
    if size:
        yield start, stop


def _pettitt(values: Floats) -> tuple[int, float]:
    """Returns the most likely split of a series, and the probability of one as clear by chance."""
    n = len(values)
    statistic = np.abs(2 * np.cumsum(rankdata(values))[:-1] - np.arange(1, n) * (n + 1))
    at = int(np.argmax(statistic))
    return at + 1, 2 * float(np.exp(-6 * statistic[at] ** 2 / (float(n) ** 3 + float(n) ** 2)))


def _are_one(one: Level, other: Level) -> bool:
    low, high = sorted((one.median, other.median))
    return high < _MIN_RATIO * low
