"""Fewer points for a curve, without losing its peaks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lbbsp_core.report.html.table import Floats, Integers

MAX_POINTS = 1500


def kept_points(values: Floats, limit: int = MAX_POINTS) -> Integers:
    """Selects the smallest and the largest value of each of equally long parts of a curve.

    Indices are ascending; both ends are kept, and all of a short curve. NaN is selected only where
    a part has nothing else.

    Example:
        >>> kept_points(np.array([0.0, 1, 9, 1, 0, 0, -5, 0, 0, 0, 0, 0]), limit=6).tolist()
        [0, 2, 6, 7, 11]
    """
    n = len(values)
    if n <= limit:
        return np.arange(n, dtype=np.int64)
    parts = limit // 2 - 1
    width = -(-n // parts)
    starts = np.arange(0, n, width)
    padded = np.full(len(starts) * width, np.nan)
    padded[:n] = values
    table = padded.reshape(-1, width)
    least = np.where(np.isnan(table), np.inf, table).argmin(axis=1)
    most = np.where(np.isnan(table), -np.inf, table).argmax(axis=1)
    kept = np.concatenate([[0], starts + least, starts + most, [n - 1]])
    return np.asarray(np.unique(kept.clip(0, n - 1)), np.int64)


def rounded(values: npt.NDArray[np.generic]) -> list[float | None]:
    """Returns numbers with five significant digits, as JSON can hold them; None for NaN."""
    return [float(f"{x:.5g}") if np.isfinite(x) else None for x in values.tolist()]
