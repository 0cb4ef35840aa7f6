r"""Allocate: exact integer minimiser of the slowest worker's time, with bounds and granularity.

This module holds the contract of `allocate`: arguments, feasibility, errors. The search is in
`lbbsp_core._selection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from lbbsp_core._selection import Curves, cheapest, remainder_worker
from lbbsp_core.cost import AffineArray, Cost
from lbbsp_core.cost.base import SEGMENT_BYTES, pack_segments
from lbbsp_core.types import Flags, Ints, Limits
from lbbsp_core.validate import require_integer

_MAX_EXACT = 2**53  # integers up to it are exact in float64, and so are their sums
_MAX_SECONDS = 1e200  # larger values could overflow


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

    over integers, exactly: times are resolved to one part in 2^60. If g does not divide X, one
    worker, chosen optimally, takes the remainder: its batch is X modulo g, plus a multiple of g.

    Paper: the problem, LB-BSP's load balancing. The paper's closed form for CPU clusters,
    ``x_i = X v_i / sum_j v_j``, solves it for `Proportional` costs without limits, but for
    rounding. Ours: the exact solution over integers, for any nondecreasing piecewise linear
    Gamma_i.

    Of the optimal plans the greedy one is returned: every granule (g samples of one worker) that
    is cheaper than the last one needed, and those of equal price dealt out one at a time, round
    after round, lower ranks first. Saturated GPUs, whose curve is flat, thus share the samples
    evenly.

    Args:
        costs: Gamma_i by rank: samples to busy seconds, nondecreasing, finite and >= 0. A batch
            of 0 still costs ``Gamma_i(0)``.
        total: X, the global batch size in samples, >= 0.
        limits: ``l_i`` and ``u_i`` in samples by rank; None means ``Limits()`` for all workers.
        granularity: g in samples, >= 1.

    Returns:
        x, samples by rank, int64, shape ``(workers,)``; sums to `total`.

    Raises:
        ValueError: No feasible plan exists, or an argument is invalid; names the remedy.

    Example:
        >>> from lbbsp_core import Affine, Limits
        >>> fast, slow = Affine(0.010, 0.001), Affine(0.035, 0.0035)
        >>> allocate([fast, slow], total=512, limits=[Limits(1, 480), Limits(1, 480)])
        array([404, 108])
        >>> allocate([fast, slow], total=512, granularity=32)
        array([416,  96])

    References:
        Chen, Weng, Wang, Li, Li: Fast Distributed Deep Learning via Worker-adaptive Batch
        Sizing, arXiv 1806.02508, 2018.

        Frederickson, Johnson: The Complexity of Selection and Ranking in X + Y and Matrices with
        Sorted Columns, JCSS 24, 1982 (the search is a selection problem of this kind).
    """
    total = require_integer("total", total, 0)
    granularity = require_integer("granularity", granularity, 1)
    curves = _read(costs)
    minima, maxima = _bounds(limits, len(costs), total)

    grain = min(granularity, total + 1)  # larger values are equivalent
    bounds = _tighten(minima, maxima, grain)
    if total % grain:
        special = _tighten(minima, maxima, grain, remainder=total % grain)
        rank = remainder_worker(curves, bounds, special, total, grain)
        bounds[:, rank] = special[:, rank]
    lowest, highest = bounds
    if not ((lowest <= highest).all() and lowest.sum() <= total <= highest.sum()):
        raise ValueError(
            f"total = {total} must be reachable within the limits by multiples of granularity = "
            f"{granularity}, with the remainder {total % granularity} at one worker: lower "
            "granularity, widen the Limits, or change the global batch size"
        )
    sizes = cheapest(curves, bounds, total, grain)
    assert int(sizes.sum()) == total
    return sizes


# Arguments


def _read(costs: Sequence[Cost]) -> Curves:
    """Returns the segments of all costs as arrays, after checking them."""
    if isinstance(costs, AffineArray) and len(costs):
        seconds, slope = costs.overhead_seconds, costs.seconds_per_sample
        right = (seconds >= 0) & (seconds <= _MAX_SECONDS) & (slope >= 0) & (slope <= _MAX_SECONDS)
        _require_valid(costs, ~right)
        start, end = np.zeros(len(costs), np.int64), np.full(len(costs), _MAX_EXACT)
        return Curves(start, end, seconds, slope, slice(None), None)
    try:
        packed = [cost.packed_segments() for cost in costs]  # type: ignore[attr-defined]
    except AttributeError:
        packed = [pack_segments(cost.segments()) for cost in costs]
    counts = np.fromiter(map(len, packed), np.int64, len(packed)) // SEGMENT_BYTES
    if not counts.all() or not len(counts):
        raise ValueError(
            "costs must have one curve per worker, each of at least one segment, got "
            f"{len(counts)} curves, {int((counts == 0).sum())} of them without segments: pass one "
            "cost per worker"
        )
    table = np.frombuffer(b"".join(packed)).reshape(-1, 3)
    if not (table.min() >= 0 and table.max() <= _MAX_SECONDS):
        _require_valid(costs, np.any(~((table >= 0) & (table <= _MAX_SECONDS)), axis=1))
    starts, seconds, slope = np.ascontiguousarray(table.T)

    if counts.max() == 1:
        _require_valid(costs, starts != 0)
        end = np.full(len(counts), _MAX_EXACT)
        return Curves(starts.astype(np.int64), end, seconds, slope, slice(None), None)

    last = np.cumsum(counts) - 1
    offset = last - counts + 1
    end, following = np.empty_like(starts), np.empty_like(seconds)
    end[:-1], following[:-1] = starts[1:] - 1, seconds[1:]
    end[last], following[last] = _MAX_EXACT, np.inf
    reached = (seconds + slope * (end - starts)) * (1 - 1e-9)  # tolerates rounding
    first = np.zeros(len(starts), np.bool_)
    first[offset] = True
    wrong = (end < starts) | (starts != np.floor(starts)) | (first != (starts == 0))
    _require_valid(costs, wrong | (reached > following))
    worker = np.repeat(np.arange(len(counts)), counts)
    return Curves(starts.astype(np.int64), end.astype(np.int64), seconds, slope, worker, offset)


def _require_valid(costs: Sequence[Cost], wrong: Flags) -> None:
    """Raises ValueError for the first worker with a wrong segment."""
    if wrong.any():
        segments = [cost.segments() for cost in costs]
        owners = chain.from_iterable([rank] * len(pieces) for rank, pieces in enumerate(segments))
        rank = list(owners)[int(wrong.argmax())]
        raise ValueError(
            f"the cost of worker {rank} must be finite, >= 0, nondecreasing and start at 0 "
            f"samples, got the segments {segments[rank]}: measure or fit it again"
        )


def _bounds(limits: Sequence[Limits] | None, workers: int, total: int) -> tuple[Ints, Ints]:
    """Returns minima and maxima by rank, after checking that they admit `total`."""
    if limits is None:
        limits = [Limits()] * workers
    if len(limits) != workers:
        raise ValueError(
            f"limits must have one entry for each of the {workers} workers, got {len(limits)}: "
            "pass one Limits per worker, or None"
        )
    minima = [bounds.minimum for bounds in limits]
    maxima = [total if bounds.maximum is None else min(bounds.maximum, total) for bounds in limits]
    if workers * total >= _MAX_EXACT:
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
    """Returns the smallest and largest batches equal to `remainder` modulo `grain`.

    The shape is ``(2, workers)``; a smallest batch may exceed its largest.
    """
    lowest = remainder - (remainder - minima) // grain * grain
    return np.array([lowest, remainder + (maxima - remainder) // grain * grain])
