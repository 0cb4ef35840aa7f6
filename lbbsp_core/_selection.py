"""Exact search of `lbbsp_core.allocate`: ladders of prices, on integer ticks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Numbers: TypeAlias = npt.NDArray[Any]
Enough: TypeAlias = Callable[[Numbers], bool]

_TICK_BITS = 60
_ROUNDING = 2**54  # ticks: more than rounding can move any price that matters
_MARGIN = 2.0**-5  # of 2^60 ticks: some more, for what is decided in floats


class Curves(NamedTuple):
    """The segments of all costs, worker after worker: arrays of shape (segments,)."""

    start: Ints  # smallest batch of the segment
    end: Ints  # largest one, inclusive
    seconds: Floats  # at `start`
    slope: Floats  # seconds per sample
    worker: Ints | slice  # whose segment it is; all, where everyone has one
    offset: Ints | None  # each worker's first segment; None where everyone has one

    def by_worker(self, values: Numbers) -> Numbers:
        """Sums whole numbers over each worker's segments: shape (workers,)."""
        return values if self.offset is None else np.asarray(np.add.reduceat(values, self.offset))


def cheapest(curves: Curves, bounds: Ints, total: int, grain: int) -> Ints:
    """Everybody's minimum, and the cheapest granules beyond it."""
    sizes: Ints = bounds[0].copy()
    needed = (total - int(sizes.sum())) // grain
    if not needed:
        return sizes
    ladders = _ladders(curves, bounds, grain, begin=1)

    def enough(granules: Numbers) -> bool:
        return bool(granules.sum() >= needed)

    below, within = (curves.by_worker(granules) for granules in _select(ladders, enough, needed))
    sizes += grain * (below + _deal(within - below, needed - int(below.sum())))
    return sizes


def remainder_worker(curves: Curves, bounds: Ints, special: Ints, total: int, grain: int) -> int:
    """The rank that had best take the remainder; the lowest of several as good.

    Unlike in `cheapest` the minima have a price here (``begin=0``): a worker that is too slow
    for its least multiple of the granularity may be just right for a smaller remainder.
    """
    lowest, low = bounds[0], special[0]
    needed = (total - (lowest.sum() - lowest + low)) // grain  # beyond the minima, by rank
    ordinary = _ladders(curves, bounds, grain, begin=0)
    remainder = _ladders(curves, special, grain, begin=0)

    def suitable(granules: Numbers) -> Flags:
        """Who could take the remainder, with so many granules to be had: shape (workers,)."""
        multiples, own = (curves.by_worker(part) for part in np.split(granules, 2))
        short = multiples < 1  # out of time for its minimum, unless that is the remainder
        beyond = multiples - 1
        possible = beyond.sum() - beyond + own - 1
        others_fit = short.sum() == short
        return np.asarray((own >= 1) & others_fit & (needed >= 0) & (possible >= needed))

    def enough(granules: Numbers) -> bool:
        return bool(suitable(granules).any())

    both = _Ladders(*map(np.concatenate, zip(ordinary, remainder, strict=True)))
    if not enough(both.length * both.weight):
        return 0  # nobody can: the check that follows says so
    _, granules = _select(both, enough, goal=2 * (int(needed.max()) + len(needed)))
    return int(suitable(granules).argmax())


def _deal(room: Ints, amount: int) -> Ints:
    """Deals out one at a time, round after round, lower ranks first, to who has room."""
    if int(room.sum()) == amount:
        return room

    def dealt_in(rounds: int) -> int:
        return int(np.minimum(room, rounds).sum())

    rounds = bisect_right(range(int(room.max()) + 1), amount, key=dealt_in) - 1
    dealt = np.minimum(room, rounds)
    dealt[np.flatnonzero(room > rounds)[: amount - int(dealt.sum())]] += 1
    return dealt


# Selection: the least time at which enough rungs of all ladders can be climbed


class _Ladders(NamedTuple):
    """Prices ``first, first + step, ...``, `length` of them: arrays of shape (ladders,).

    A level ladder (a flat segment: all rungs at one price) is kept as a single rung that holds
    `weight` granules; all others hold one a rung. Prices are float64 seconds or int64 ticks.
    """

    first: Numbers
    step: Numbers
    length: Ints
    weight: Ints

    def rungs(self, time: float) -> Numbers:
        """How many rungs of each ladder cost at most `time`."""
        ahead = time - self.first
        # Floats: rounding moves a price by less than the margin of `_near`, and // is slow there.
        steps = ahead // self.step if ahead.dtype == np.int64 else np.floor(ahead / self.step)
        return np.minimum(np.maximum(steps + 1, 0), self.length)

    def granules(self, time: float) -> Numbers:
        """How many granules of each ladder cost at most `time`."""
        return self.rungs(time) * self.weight

    def of(self, some: Ints) -> _Ladders:
        """Some of the ladders."""
        return _Ladders(*(values[some] for values in self))


class _Near(NamedTuple):
    """The ladders among whose rungs T* is, in ticks; the others' granules are known."""

    ladders: _Ladders
    which: Ints  # of these ladders among all
    known: Ints  # granules of all ladders, right for the others

    def granules(self, rungs: Ints) -> Ints:
        """Granules of all ladders, with so many rungs of the near ones."""
        granules: Ints = self.known.copy()
        granules[self.which] = rungs * self.ladders.weight
        return granules

    def at(self, ticks: int) -> Ints:
        """Granules of all ladders that cost at most so many ticks."""
        return self.granules(self.ladders.rungs(ticks))

    def between(self, low: Ints, high: Ints) -> _Near:
        """What is still near, once between `low` and `high` rungs of each are known to do."""
        some = np.flatnonzero(high > low)
        return _Near(self.ladders.of(some), self.which[some], self.granules(low))

    def prices(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Of the rungs after the first `low`, up to number `high`: sorted prices, and granules."""
        first, step, _, weight = self.ladders
        counts = high - low
        ladder = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(ladder)) - (np.cumsum(counts) - high)[ladder]
        prices, each = first[ladder] + step[ladder] * number, weight[ladder]
        if (each == 1).all():
            return np.sort(prices), each
        order = np.argsort(prices)
        return prices[order], each[order]


def _ladders(curves: Curves, bounds: Ints, grain: int, begin: int) -> _Ladders:
    """Prices, in seconds, of ``x = lowest + grain * k`` for k from `begin`, segment by segment."""
    lowest, highest = bounds[:, curves.worker]
    k = np.maximum(begin, -((lowest - curves.start) // grain))
    length = np.maximum((np.minimum(highest, curves.end) - lowest) // grain + 1 - k, 0)
    first = curves.seconds + (lowest + grain * k - curves.start) * curves.slope
    return _level(first, curves.slope * grain, length)


def _level(first: Numbers, step: Numbers, length: Ints, weight: Ints | None = None) -> _Ladders:
    weight = np.ones_like(length) if weight is None else weight
    flat = step == 0
    if flat.any():
        weight = np.where(flat, length * weight, weight)
        step, length = np.where(flat, 1, step), np.where(flat, np.minimum(length, 1), length)
    return _Ladders(first, step, length, weight)


def _select(ladders: _Ladders, enough: Enough, goal: int) -> tuple[Ints, Ints]:
    """Granules of each ladder that cost less than T*, and that cost at most T*.

    T* is the least price at which ``enough(granules)``. `goal`, about how many that takes,
    steers the search and has no influence on the result.
    """
    near = _near(ladders, _exponent(ladders, enough, goal), enough)
    low, high = _bracket(near, enough, goal)
    prices, each = near.prices(low, high)
    guess = np.searchsorted(np.cumsum(each), goal - int(near.granules(low).sum()))
    near = near.between(low, high)

    best = int(prices[min(int(guess), len(prices) - 1)])  # right, if `goal` is
    below, within = near.at(best - 1), near.at(best)
    if enough(below) or not enough(within):
        listed = prices.tolist()
        best = listed[bisect_left(listed, True, key=lambda price: enough(near.at(price)))]
        below, within = near.at(best - 1), near.at(best)
    return below, within


def _exponent(ladders: _Ladders, enough: Enough, goal: int) -> int:
    """The least e such that 2^e seconds are enough: found in floats, but the same anywhere."""

    def reached(exponent: int) -> bool:
        return enough(ladders.granules(2.0**exponent))

    middle = len(ladders.first) // 2
    share = np.minimum(goal / len(ladders.first), ladders.length)
    typical = np.partition(ladders.first + ladders.step * share, middle)[middle]
    high = min(max(int(np.frexp(typical)[1]), -900), 900)
    low = high - 1
    with np.errstate(over="ignore", invalid="ignore"):
        while not reached(high):
            low, high = high, min(3 * high - 2 * low, 1000)
        while low > -1000 and reached(low):
            low, high = max(3 * low - 2 * high, -1000), low
        return bisect_left(range(low + 1, high), True, key=reached) + low + 1


def _near(ladders: _Ladders, exponent: int, enough: Enough) -> _Near:
    """The ladders with rungs about T*, between 2^(exponent - 1) and 2^exponent seconds."""
    low = ladders.rungs(2.0**exponent * (0.5 - _MARGIN))
    if enough(low * ladders.weight):  # T* is 0, or as good as that
        low = np.zeros_like(low)
    some = np.flatnonzero(ladders.rungs(2.0**exponent * (1 + _MARGIN)) > low)
    known = (low * ladders.weight).astype(np.int64)
    return _Near(_in_ticks(ladders.of(some), exponent), some, known)


def _in_ticks(ladders: _Ladders, exponent: int) -> _Ladders:
    """The same ladders with 2^exponent seconds as 2^60 ticks; what is far above, is clipped."""

    def ticks(seconds: Floats) -> Ints:
        near = np.minimum(seconds, 2.0 ** (exponent + 2))
        rounded: Floats = np.rint(np.ldexp(near, _TICK_BITS - exponent))
        return rounded.astype(np.int64)

    first, step, length, weight = ladders
    return _level(ticks(first), ticks(step), length, weight)


def _bracket(near: _Near, enough: Enough, goal: int) -> tuple[Ints, Ints]:
    """Rungs at a time too early and at one late enough, few enough apart to be listed.

    Interpolates towards a little more or less than `goal` granules, so that both ends close in;
    halves the interval of time instead where that did not halve the rungs in it.
    """
    ladders = near.ladders
    early, late = 2 ** (_TICK_BITS - 1) - _ROUNDING, 2**_TICK_BITS + _ROUNDING
    low, high = ladders.rungs(early), ladders.rungs(late)
    if enough(near.granules(low)):  # T* is 0, or as good as that
        early, low = -1, np.zeros_like(low)
    margin = len(low) // 4 + 1
    aim, before, apart = goal + margin, 0, int((high - low).sum())
    while apart > 2 * len(low) + 1000:
        at_low, at_high = int(near.granules(low).sum()), int(near.granules(high).sum())
        time = early + (late - early) * (aim - at_low) // (at_high - at_low)
        if 2 * apart > before > 0:
            time = (early + late) // 2
        time = min(max(time, early + 1), late - 1)
        rungs = ladders.rungs(time)
        if enough(near.granules(rungs)):
            late, high, aim = time, rungs, goal - margin
        else:
            early, low, aim = time, rungs, goal + margin
        before, apart = apart, int((high - low).sum())
    return low, high
