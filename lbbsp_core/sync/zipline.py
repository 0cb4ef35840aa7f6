"""ZipLine: picks one predicted push of each worker, all as close together as possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lbbsp_core.validate import require_known

Method = Literal["zipline", "opt", "optbs", "fullgrid", "grid"]
Times = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]


class ZipLineResult(NamedTuple):
    """Result of `zipline`.

    Args:
        indices: Index of each worker's chosen time, counted from 0, shape ``(workers,)``.
        spread: Latest minus earliest chosen time, in seconds.
        barrier: Latest chosen time, in seconds.
    """

    indices: npt.NDArray[np.int64]
    spread: float
    barrier: float


def zipline(times: npt.ArrayLike, method: Method = "zipline") -> ZipLineResult:
    r"""Picks one time of each worker with the smallest spread from the earliest to the latest.

    Solves ``min_z max_p e[p, z_p] - min_p e[p, z_p]``; the first such minimum wins. Paper: merge
    all points in the order of time and keep each worker's newest point; whenever one arrives,
    compare the newest with the oldest of these n points. All exact methods examine the same
    candidates:

    ``"zipline"`` (paper: ZipLine, O(R n^2))
        Ours: all candidates at once, in arrays. The oldest point of a candidate is the first one
        that its worker has not replaced yet, a running minimum from the end of the merged order.
        O(R n log(R n)), mostly for sorting, and the fastest by far on many workers.
    ``"opt"`` (paper: ZipLineOpt)
        One pass that stops only where the oldest point is replaced. Paper: other replaced points
        are searched for and dropped at once; ours: when they have become the oldest.
    ``"optbs"`` (paper: ZipLineOptBS)
        Binary search for the oldest point of each candidate. Paper: for the replaced point, in
        the sorted set of newest points; ours: in the running maximum of the positions at which
        points are replaced, for all candidates at once.
    ``"fullgrid"`` (paper: FullGridScan)
        A reference: every point as the earliest one, with the first point of each other worker
        that is not before it. O(R n^2 log R) by binary search; the paper scans, in O(R^2 n^2).
    ``"grid"`` (paper: GridScan)
        A heuristic, not exact: each point of the worker with the earliest point, with the nearest
        point of each other worker. O(R^2 n).

    The first three agree on the indices (each worker's last point up to the barrier, so that as
    much work as possible is done before it), the other exact one on the spread only.

    Args:
        times: e, predicted push times in seconds, finite, shape ``(workers, lookahead)``, each
            row ascending (equal times are allowed).
        method: One of the names above.

    Returns:
        Indices of the chosen times, their spread, and the barrier.

    Raises:
        ValueError: `times` is not such an array, or the method is unknown.

    Example:
        >>> zipline([[1.0, 2.0, 3.0], [2.5, 5.0, 7.5]])
        ZipLineResult(indices=array([1, 0]), spread=0.5, barrier=2.5)

    References:
        Zhao, Papagelis, An, Chen, Liu, Hu: Elastic Bulk Synchronous Parallel Model for
        Distributed Deep Learning, ICDM 2019, arXiv 2001.01347 (ZipLine, GridScan, FullGridScan);
        extended in Machine Learning, 2021 (ZipLineOpt, ZipLineOptBS).
    """
    search = _METHODS[require_known("method", method, _METHODS)]
    table = _read(times)
    indices = search(table)
    chosen = table[np.arange(len(table)), indices]
    barrier = float(chosen.max())
    return ZipLineResult(indices.astype(np.int64), barrier - float(chosen.min()), barrier)


# The merged order: positions 0, 1, ... of all points by time; ties by worker, then by index


def _merge(table: Times) -> tuple[Times, Ints]:
    """Returns the times in that order, and the position of each point of the table in it."""
    flat = table.ravel()
    order = np.argsort(flat, kind="stable")
    positions = np.empty_like(order)
    positions[order] = np.arange(len(order))
    return flat[order], positions.reshape(table.shape)


def _first(positions: Ints) -> int:
    """Returns the smallest position up to which every worker has a point."""
    return int(positions[:, 0].max())


def _newest(positions: Ints, position: int) -> Ints:
    """Returns the index of each worker's last point up to a position."""
    return np.asarray((positions <= position).sum(axis=1) - 1)


def _replaced_at(positions: Ints) -> Ints:
    """Returns the position of the same worker's next point; beyond the end for its last one."""
    after = np.full(positions.size, positions.size)
    after[positions[:, :-1]] = positions[:, 1:]
    return after


def _sweep(table: Times) -> Ints:
    times, positions = _merge(table)
    first, last = _first(positions), int(positions[:, -1].min())
    replaces = np.full(table.size, last)  # position that the point replaces
    replaces[positions[:, 1:]] = positions[:, :-1]
    not_replaced = np.append(replaces[first + 1 :], last)  # replaced later, or never
    oldest = np.minimum.accumulate(not_replaced[::-1])[::-1]
    spreads = times[first:] - times[oldest]
    return _newest(positions, first + int(spreads.argmin()))


def _jump(table: Times) -> Ints:
    merged, positions = _merge(table)
    times, replaced_at = merged.tolist(), _replaced_at(positions).tolist()
    position, oldest = _first(positions), 0
    best, smallest = position, float("inf")
    while position < len(times):
        while replaced_at[oldest] <= position:
            oldest += 1
        if (spread := times[position] - times[oldest]) < smallest:
            best, smallest = position, spread
        position = replaced_at[oldest]
    return _newest(positions, best)


def _bisect(table: Times) -> Ints:
    times, positions = _merge(table)
    candidates = np.arange(_first(positions), table.size)
    replaced_by = np.maximum.accumulate(_replaced_at(positions))  # the point and all older ones
    oldest = np.searchsorted(replaced_by, candidates, side="right")
    spreads = times[candidates] - times[oldest]
    return _newest(positions, int(candidates[spreads.argmin()]))


# Reference methods, which read the table directly


def _full_grid(table: Times) -> Ints:
    latest = table.copy()
    for row in table:
        following = np.searchsorted(row, table)
        np.maximum(latest, np.append(row, np.inf)[following], out=latest)
    earliest = table.flat[int((latest - table).argmin())]
    return np.array([np.searchsorted(row, earliest) for row in table])


def _grid(table: Times) -> Ints:
    reference = table[table[:, 0].argmin()]  # the row with the earliest point
    nearest = np.array([np.abs(row[:, None] - reference).argmin(axis=0) for row in table])
    chosen = np.take_along_axis(table, nearest, axis=1)
    return np.asarray(nearest[:, int(np.ptp(chosen, axis=0).argmin())])


_METHODS: dict[str, Callable[[Times], Ints]] = {
    "zipline": _sweep,
    "opt": _jump,
    "optbs": _bisect,
    "fullgrid": _full_grid,
    "grid": _grid,
}


# Validation of the argument


def _read(times: npt.ArrayLike) -> Times:
    try:
        table = np.asarray(times, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"times must be numbers of shape (workers, lookahead), as many for each worker: {error}"
        ) from error
    if table.ndim != 2 or not table.size:
        raise ValueError(
            "times must have shape (workers, lookahead), with at least one of each, got shape "
            f"{table.shape}: predict one or more push times of every worker"
        )
    if not np.isfinite(table).all():
        worker, index = np.argwhere(~np.isfinite(table))[0].tolist()
        raise ValueError(
            f"times must be finite, got {table[worker, index]} for worker {worker} at index "
            f"{index}: leave out workers without a prediction"
        )
    if (np.diff(table) < 0).any():
        worker, index = np.argwhere(np.diff(table) < 0)[0].tolist()
        raise ValueError(
            f"times must ascend in each row, got {table[worker, index]} before "
            f"{table[worker, index + 1]} for worker {worker} at index {index}: sort the rows"
        )
    return table
