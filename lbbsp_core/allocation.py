r"""Allocate: the exact integer minimiser of the slowest worker, with bounds and granularity.

LB-BSP's problem (Chen et al., arXiv 1806.02508) is ``min max_i Gamma_i(x_i)`` such that
``sum x_i = X``. Every curve is nondecreasing, so it is a selection problem: each worker starts
from its minimum, and the batch is made of the *cheapest granules* of all workers together,
where the price of a granule is the time its worker needs once it holds it. Along one linear
segment of a curve the prices form a *ladder* ``first, first + step, first + 2 step, ...``, and
the price of the last granule needed, T*, is found without listing them all.

Every worker computes its plan by itself, so the same inputs must give the same plan on any
processor. Decisions are therefore made on integer *ticks*: prices times a power of two that
puts T* between 2^59 and 2^60 ticks. Floating point appears elementwise only, or in sums of
whole numbers below 2^53, which are exact in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import numpy as np

from lbbsp_core._selection import Curves, Flags, Ints, cheapest, remainder_worker
from lbbsp_core.cost import AffineArray, Cost
from lbbsp_core.cost.base import SEGMENT_BYTES, pack_segments
from lbbsp_core.types import Limits
from lbbsp_core.validate import require_integer

_MANY = 2**53  # whole numbers below it are exact in float64, and so are their sums
_LARGEST = 1e200  # seconds beyond it could overflow


def allocate(
    costs: Sequence[Cost],
    *,
    total: int,
    limits: Sequence[Limits] | None = None,
    granularity: int = 1,
) -> Ints:
    r"""Splits a global batch so that the slowest worker finishes as early as possible.

    .. math:: \min_x \max_i \Gamma_i(x_i) \quad \text{s.t.} \quad \textstyle\sum_i x_i = X,
        \quad l_i \le x_i \le u_i, \quad g \mid x_i

    over integers, exactly: seconds are told apart to a part in 2^60 per sample. Where g does
    not divide X, one worker (the best one) takes the remainder: its batch is X modulo g.

    Of the plans that reach the optimum we take the greedy one: all granules that cost less
    than the last one needed, and those that cost exactly as much dealt out evenly, one at a
    time, lower ranks first. Saturated GPUs, whose curve is flat, so share instead of one
    taking all.

    Args:
        costs: Gamma_i by rank: samples to busy seconds, nondecreasing, finite and >= 0. A batch
            of 0 still costs ``Gamma_i(0)``.
        total: X, the global batch size in samples, >= 0.
        limits: ``l_i`` and ``u_i`` in samples by rank; None is ``Limits()`` for everybody.
        granularity: g in samples, >= 1.

    Returns:
        x, samples by rank, int64, shape ``(workers,)``; sums to `total`.

    Raises:
        ValueError: No such plan exists, or an argument makes no sense; names the cure.

    Example:
        >>> from lbbsp_core import Affine, Limits
        >>> fast, slow = Affine(0.010, 0.001), Affine(0.035, 0.0035)
        >>> allocate([fast, slow], total=512, limits=[Limits(1, 480), Limits(1, 480)])
        array([404, 108])
        >>> allocate([fast, slow], total=512, granularity=32)
        array([416,  96])

    References:
        Chen, Weng, Wang, Li, Li: Fast Distributed Deep Learning via Worker-adaptive Batch
        Sizing, arXiv 1806.02508, 2018. Frederickson, Johnson: The Complexity of Selection and
        Ranking in X + Y and Matrices with Sorted Columns, JCSS 24, 1982 (the kind of problem).
    """
    total, granularity = (
        require_integer("total", total, 0),
        require_integer("granularity", granularity, 1),
    )
    curves = _read(costs)
    minima, maxima = _bounds(limits, len(costs), total)

    grain = min(granularity, total + 1)  # a larger one means the same
    bounds = _tighten(minima, maxima, grain)
    if total % grain:
        special = _tighten(minima, maxima, grain, remainder=total % grain)
        rank = remainder_worker(curves, bounds, special, total, grain)
        bounds[:, rank] = special[:, rank]
    if not _feasible(bounds, total):
        raise ValueError(
            f"total = {total} must be reachable within the limits in multiples of granularity = "
            f"{granularity}, but for one worker that takes the remainder {total % granularity}: "
            "lower granularity, widen the Limits, or change the global batch size"
        )
    sizes = cheapest(curves, bounds, total, grain)
    assert int(sizes.sum()) == total
    return sizes


# Reading the arguments


def _read(costs: Sequence[Cost]) -> Curves:
    if isinstance(costs, AffineArray) and len(costs):
        return _read_lines(costs)
    packed = _packed(costs)
    counts = np.fromiter(map(len, packed), np.int64, len(packed)) // SEGMENT_BYTES
    if not counts.all() or not len(counts):
        raise ValueError("costs must hold a curve a worker, each of at least one segment")
    table = np.frombuffer(b"".join(packed)).reshape(-1, 3)
    if not (table.min() >= 0 and table.max() <= _LARGEST):
        _refuse(costs, np.any(~((table >= 0) & (table <= _LARGEST)), axis=1))
    start, seconds, slope = np.ascontiguousarray(table.T)

    if counts.max() == 1:
        _refuse(costs, start != 0)
        end = np.full(len(counts), _MANY)
        return Curves(start.astype(np.int64), end, seconds, slope, slice(None), None)

    last = np.cumsum(counts) - 1
    offset = last - counts + 1
    end, following = np.empty_like(start), np.empty_like(seconds)
    end[:-1], following[:-1] = start[1:] - 1, seconds[1:]
    end[last], following[last] = _MANY, np.inf
    reached = (seconds + slope * (end - start)) * (1 - 1e-9)  # a fall beyond rounding is wrong
    first = np.zeros(len(start), np.bool_)
    first[offset] = True
    wrong = (end < start) | (start != np.floor(start)) | (first != (start == 0))
    _refuse(costs, wrong | (reached > following))
    worker = np.repeat(np.arange(len(counts)), counts)
    return Curves(start.astype(np.int64), end.astype(np.int64), seconds, slope, worker, offset)


def _read_lines(lines: AffineArray) -> Curves:
    seconds, slope = lines.overhead_seconds, lines.seconds_per_sample
    wrong = ~((seconds >= 0) & (seconds <= _LARGEST) & (slope >= 0) & (slope <= _LARGEST))
    if wrong.any():
        _refuse(lines, wrong)
    start, end = np.zeros(len(lines), np.int64), np.full(len(lines), _MANY)
    return Curves(start, end, seconds, slope, slice(None), None)


def _packed(costs: Sequence[Cost]) -> list[bytes]:
    """The segments of each cost as bytes, as it keeps them itself where it is one of ours."""
    try:
        return [cost.packed_segments() for cost in costs]  # type: ignore[attr-defined]
    except AttributeError:
        return [pack_segments(cost.segments()) for cost in costs]


def _refuse(costs: Sequence[Cost], wrong: Flags) -> None:
    """Raises ValueError for the first worker with a wrong segment, if there is one."""
    if wrong.any():
        segments = [cost.segments() for cost in costs]
        owners = chain.from_iterable([rank] * len(own) for rank, own in enumerate(segments))
        rank = list(owners)[int(wrong.argmax())]
        raise ValueError(
            f"the cost of worker {rank} must be finite, >= 0, nondecreasing and begin at 0 "
            f"samples, got the segments {segments[rank]}: measure or fit it again"
        )


def _bounds(limits: Sequence[Limits] | None, workers: int, total: int) -> tuple[Ints, Ints]:
    """Minima and maxima by rank, once they are known to leave room for `total`."""
    if limits is None:
        limits = [Limits()] * workers
    if len(limits) != workers:
        raise ValueError(f"limits must be one for each of the {workers} workers, got {len(limits)}")
    minima = list(map(attrgetter("minimum"), limits))
    maxima = [
        total if most is None or most > total else most
        for most in map(attrgetter("maximum"), limits)
    ]
    if workers * total >= _MANY:
        raise ValueError(
            f"workers * total must be below 2**53, got {workers} * {total}: lower the global batch "
            "size"
        )
    if sum(minima) > total:
        raise ValueError(
            f"total must be at least the sum of minima = {sum(minima)}, got {total}: raise the "
            "global batch size, or lower Limits.minimum"
        )
    if sum(maxima) < total:
        raise ValueError(
            f"total must be at most the sum of maxima = {sum(maxima)}, got {total}: lower the "
            "global batch size, raise Limits.maximum, or add workers"
        )
    return np.array(minima, np.int64), np.array(maxima, np.int64)


def _tighten(minima: Ints, maxima: Ints, grain: int, remainder: int = 0) -> Ints:
    """The smallest and largest batch that is `remainder` modulo `grain`: shape (2, workers)."""
    lowest = remainder - (remainder - minima) // grain * grain
    return np.array([lowest, remainder + (maxima - remainder) // grain * grain])


def _feasible(bounds: Ints, total: int) -> bool:
    lowest, highest = bounds
    return bool((lowest <= highest).all() and lowest.sum() <= total <= highest.sum())
