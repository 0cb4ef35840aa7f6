r"""Exact search of `lbbsp_core.allocate` for the price of the last granule that is needed.

Every curve is nondecreasing, so ``min max_i Gamma_i(x_i)`` with ``sum x_i = X`` is a selection
problem: each worker starts from its minimum, and the batch consists of the *cheapest granules*
of all workers together, where the price of a granule is the time its worker needs with it.
Along one linear segment of a curve the prices form a *ladder* ``first, first + step,
first + 2 step, ...``, and the price T* of the last granule needed is found without listing them
all.

Every worker computes the plan separately, so the same inputs must give the same plan on any
processor. Decisions are therefore made on integer *ticks*: prices times the power of two that
puts T* between 2^59 and 2^60 ticks. Floating point occurs only elementwise, or in sums of
integers below 2^53, which are exact in any order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lbbsp_core.types import Flags, Floats, Ints

Numbers: TypeAlias = npt.NDArray[Any]
Enough: TypeAlias = Callable[[Numbers], bool]
"""Returns whether granules, counted by ladder, suffice; monotone in each count."""

_TICK_BITS = 60
_ROUNDING = 2**54  # ticks: bounds the rounding error of every price near T*
_MARGIN = 2.0**-5  # of 2^60 ticks: a wider bound for decisions in floats


class Curves(NamedTuple):
    """Segments of all costs, worker after worker: arrays of shape ``(segments,)``.

    Args:
        start: Smallest batch of the segment, in samples.
        end: Largest batch of the segment, inclusive.
        seconds: Seconds at `start`.
        slope: Seconds per sample.
        worker: Rank of the segment's worker; a full slice if each worker has one segment.
        offset: Index of each worker's first segment; None if each worker has one segment.
    """

    start: Ints
    end: Ints
    seconds: Floats
    slope: Floats
    worker: Ints | slice
    offset: Ints | None

    def by_worker(self, values: Numbers) -> Numbers:
        """Sums integers over each worker's segments; returns shape ``(workers,)``."""
        return values if self.offset is None else np.asarray(np.add.reduceat(values, self.offset))


def cheapest(curves: Curves, bounds: Ints, total: int, grain: int) -> Ints:
    """Returns the batches by rank: each worker's minimum plus the cheapest granules.

    `bounds`, of shape ``(2, workers)``, are congruent modulo `grain`; `total` lies between their
    sums.
    """
    sizes: Ints = bounds[0].copy()
    needed = (total - int(sizes.sum())) // grain
    if not needed:
        return sizes
    ladders = _price_ladders(curves, bounds, grain, first_granule=1)

    def enough(granules: Numbers) -> bool:
        return bool(granules.sum() >= needed)

    below, within = (curves.by_worker(granules) for granules in _select(ladders, enough, needed))
    sizes += grain * (below + _deal(within - below, needed - int(below.sum())))
    return sizes


def remainder_worker(curves: Curves, bounds: Ints, special: Ints, total: int, grain: int) -> int:
    """Returns the rank for which taking the remainder is optimal, the lowest one on a tie.

    Unlike in `cheapest` the minima have a price here (``first_granule=0``): a worker that is too
    slow for its smallest multiple of the granularity can be the best one for a smaller remainder.
    `bounds` are multiples of `grain`; `special` are those of batches equal to the remainder modulo
    `grain`. Both have the shape ``(2, workers)``.
    """
    minima = bounds[0]
    needed = (total - (minima.sum() - minima + special[0])) // grain  # beyond the minima, by rank
    ordinary = _price_ladders(curves, bounds, grain, first_granule=0)
    remainder = _price_ladders(curves, special, grain, first_granule=0)

    def suitable(granules: Numbers) -> Flags:
        """Returns which workers could take the remainder with `granules`, ``(workers,)``."""
        multiples, remainders = (curves.by_worker(part) for part in np.split(granules, 2))
        too_slow = multiples < 1  # for its minimum, unless it takes the remainder
        beyond = multiples - 1
        possible = beyond.sum() - beyond + remainders - 1
        others_fit = too_slow.sum() == too_slow
        return np.asarray((remainders >= 1) & others_fit & (needed >= 0) & (possible >= needed))

    def enough(granules: Numbers) -> bool:
        return bool(suitable(granules).any())

    both = Ladders(*map(np.concatenate, zip(ordinary, remainder, strict=True)))
    if not enough(both.length * both.weight):
        return 0  # infeasible: the caller checks it
    _, granules = _select(both, enough, goal=2 * (int(needed.max()) + len(needed)))
    return int(suitable(granules).argmax())


def _deal(room: Ints, amount: int) -> Ints:
    """Deals out `amount` one at a time, round after round, lower ranks first."""
    if int(room.sum()) == amount:
        return room
    most = range(int(room.max()) + 1)
    rounds = bisect_right(most, amount, key=lambda count: int(np.minimum(room, count).sum())) - 1
    dealt = np.minimum(room, rounds)
    dealt[np.flatnonzero(room > rounds)[: amount - int(dealt.sum())]] += 1
    return dealt


# Selection: the smallest time whose rungs hold enough granules


class Ladders(NamedTuple):
    """Price ladders ``first, first + step, ...``: arrays of shape ``(ladders,)``.

    A flat segment, whose rungs all have one price, is stored as a single rung of several
    granules; every other rung holds one. Prices are float64 seconds or int64 ticks.

    Args:
        first: Price of the first rung.
        step: Price difference of consecutive rungs, > 0.
        length: Number of rungs.
        weight: Granules per rung.
    """

    first: Numbers
    step: Numbers
    length: Ints
    weight: Ints

    def rungs(self, time: float) -> Numbers:
        """Returns how many rungs of each ladder cost at most `time`."""
        excess = time - self.first
        # Division of floats is faster than //; its rounding is below the margin of `_near_optimum`.
        steps = excess // self.step if excess.dtype == np.int64 else np.floor(excess / self.step)
        return np.minimum(np.maximum(steps + 1, 0), self.length)

    def granules(self, time: float) -> Numbers:
        """Returns how many granules of each ladder cost at most `time`."""
        return self.rungs(time) * self.weight

    def subset(self, index: Ints) -> Ladders:
        """Returns the ladders at `index`."""
        return Ladders(*(values[index] for values in self))


class _NearLadders(NamedTuple):
    """Ladders whose rungs may have the price T*, in ticks; the granules of the others are known."""

    ladders: Ladders
    positions: Ints  # of `ladders` among all ladders
    known: Ints  # granules below T* of all ladders, valid except at `positions`

    def granules(self, rungs: Ints) -> Ints:
        """Returns the granules of all ladders, given the rungs of the near ones."""
        granules: Ints = self.known.copy()
        granules[self.positions] = rungs * self.ladders.weight
        return granules

    def granules_at(self, ticks: int) -> Ints:
        """Returns the granules of all ladders that cost at most `ticks`."""
        return self.granules(self.ladders.rungs(ticks))

    def between(self, low: Ints, high: Ints) -> _NearLadders:
        """Returns the ladders that stay near if T* lies after `low` and up to `high` rungs."""
        index = np.flatnonzero(high > low)
        return _NearLadders(self.ladders.subset(index), self.positions[index], self.granules(low))

    def prices(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Returns prices, ascending, and granules of the rungs `low` to `high` of each ladder."""
        first, step, _, weight = self.ladders
        counts = high - low
        ladder = np.repeat(np.arange(len(counts)), counts)
        rung = np.arange(len(ladder)) - (np.cumsum(counts) - high)[ladder]
        prices, granules = first[ladder] + step[ladder] * rung, weight[ladder]
        if (granules == 1).all():
            return np.sort(prices), granules
        order = np.argsort(prices)
        return prices[order], granules[order]


def _price_ladders(curves: Curves, bounds: Ints, grain: int, first_granule: int) -> Ladders:
    """Returns the prices in seconds of ``x = lowest + grain * k``, one ladder per segment.

    A `first_granule` of 0 includes the smallest batch itself, one of 1 does not.
    """
    lowest, highest = bounds[:, curves.worker]
    k = np.maximum(first_granule, -((lowest - curves.start) // grain))
    length = np.maximum((np.minimum(highest, curves.end) - lowest) // grain + 1 - k, 0)
    first = curves.seconds + (lowest + grain * k - curves.start) * curves.slope
    return _make_ladders(first, curves.slope * grain, length, np.ones_like(length))


def _make_ladders(first: Numbers, step: Numbers, length: Ints, weight: Ints) -> Ladders:
    """Returns ladders with each flat one as a single rung of all its granules."""
    flat = step == 0
    if flat.any():
        weight = np.where(flat, length * weight, weight)
        step, length = np.where(flat, 1, step), np.where(flat, np.minimum(length, 1), length)
    return Ladders(first, step, length, weight)


def _select(ladders: Ladders, enough: Enough, goal: int) -> tuple[Ints, Ints]:
    """Returns the granules of each ladder that cost less than T*, and those that cost at most T*.

    T* is the smallest price at which ``enough(granules)``. `enough` is monotone, and true for all
    granules; `goal`, about how many are enough, only guides the search.
    """
    near = _near_optimum(ladders, _exponent(ladders, enough, goal), enough)
    low, high = _bracket(near, enough, goal)
    prices, granules = near.prices(low, high)
    guess = np.searchsorted(np.cumsum(granules), goal - int(near.granules(low).sum()))
    near = near.between(low, high)

    price = int(prices[min(int(guess), len(prices) - 1)])  # T*, if `goal` is exact
    below, within = near.granules_at(price - 1), near.granules_at(price)
    if enough(below) or not enough(within):
        candidates = prices.tolist()
        first = bisect_left(candidates, True, key=lambda ticks: enough(near.granules_at(ticks)))
        price = candidates[first]
        below, within = near.granules_at(price - 1), near.granules_at(price)
    return below, within


def _exponent(ladders: Ladders, enough: Enough, goal: int) -> int:
    """Returns the smallest e such that 2^e seconds are enough.

    Powers of two make it the same on every processor although it is computed in floats.
    """

    def is_enough(exponent: int) -> bool:
        return enough(ladders.granules(2.0**exponent))

    middle = len(ladders.first) // 2
    rungs = np.minimum(goal / len(ladders.first), ladders.length)
    typical = np.partition(ladders.first + ladders.step * rungs, middle)[middle]
    high = min(max(int(np.frexp(typical)[1]), -900), 900)
    low = high - 1
    with np.errstate(over="ignore", invalid="ignore"):
        while not is_enough(high):
            low, high = high, min(3 * high - 2 * low, 1000)
        while low > -1000 and is_enough(low):
            low, high = max(3 * low - 2 * high, -1000), low
        return bisect_left(range(low + 1, high), True, key=is_enough) + low + 1


def _near_optimum(ladders: Ladders, exponent: int, enough: Enough) -> _NearLadders:
    """Returns the ladders that have rungs between 2^(exponent - 1) and 2^exponent seconds."""
    low = ladders.rungs(2.0**exponent * (0.5 - _MARGIN))
    if enough(low * ladders.weight):  # T* is 0 or negligible against 2^exponent
        low = np.zeros_like(low)
    index = np.flatnonzero(ladders.rungs(2.0**exponent * (1 + _MARGIN)) > low)
    granules = (low * ladders.weight).astype(np.int64)
    return _NearLadders(_to_ticks(ladders.subset(index), exponent), index, granules)


def _to_ticks(ladders: Ladders, exponent: int) -> Ladders:
    """Converts seconds to ticks, 2^60 per 2^exponent seconds; clips prices far above T*."""

    def ticks(seconds: Floats) -> Ints:
        clipped = np.minimum(seconds, 2.0 ** (exponent + 2))
        rounded: Floats = np.rint(np.ldexp(clipped, _TICK_BITS - exponent))
        return rounded.astype(np.int64)

    first, step, length, weight = ladders
    return _make_ladders(ticks(first), ticks(step), length, weight)


def _bracket(near: _NearLadders, enough: Enough, goal: int) -> tuple[Ints, Ints]:
    """Returns the rungs at a time before T* and at one from T* on, few enough apart to be listed.

    Interpolates towards slightly more or fewer than `goal` granules, so that both ends converge;
    bisects the time interval instead if that did not halve the number of rungs in it.
    """
    ladders = near.ladders
    early, late = 2 ** (_TICK_BITS - 1) - _ROUNDING, 2**_TICK_BITS + _ROUNDING
    low, high = ladders.rungs(early), ladders.rungs(late)
    if enough(near.granules(low)):  # T* is 0 or negligible against 2^exponent
        early, low = -1, np.zeros_like(low)
    margin = len(low) // 4 + 1
    target, previous, remaining = goal + margin, 0, int((high - low).sum())
    while remaining > 2 * len(low) + 1000:
        at_low, at_high = int(near.granules(low).sum()), int(near.granules(high).sum())
        time = early + (late - early) * (target - at_low) // (at_high - at_low)
        if 2 * remaining > previous > 0:
            time = (early + late) // 2
        time = min(max(time, early + 1), late - 1)
        rungs = ladders.rungs(time)
        if enough(near.granules(rungs)):
            late, high, target = time, rungs, goal - margin
        else:
            early, low, target = time, rungs, goal + margin
        previous, remaining = remaining, int((high - low).sum())
    return low, high
