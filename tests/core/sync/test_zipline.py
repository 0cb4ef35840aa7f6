"""`zipline` against exhaustive search, the algorithm as printed, and its properties."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from lbbsp_core import zipline

EXACT = ("zipline", "opt", "optbs", "fullgrid")
IN_ORDER = ("zipline", "opt", "optbs")

Rows = list[list[float]]


def smallest_spread(rows: Rows) -> float:
    """Returns the smallest spread of all choices, by brute force."""
    return min(max(chosen) - min(chosen) for chosen in itertools.product(*rows))


def as_printed(rows: Rows) -> tuple[list[int], float]:
    """Runs ZipLine as the paper prints it: a set Z with one point per worker, ordered by time."""
    points = sorted((e, p, i) for p, row in enumerate(rows) for i, e in enumerate(row))
    z: list[tuple[float, int, int]] = []
    newest: dict[int, int] = {}
    best: tuple[list[int], float] = [], math.inf
    for point in points:
        z = [other for other in z if other[1] != point[1]] + [point]
        newest[point[1]] = point[2]
        if len(z) == len(rows):
            if z[-1][0] - z[0][0] < best[1]:
                best = [newest[p] for p in range(len(rows))], z[-1][0] - z[0][0]
            z.pop(0)
    return best


def grid_as_printed(rows: Rows) -> tuple[list[int], float]:
    """Runs GridScan point by point, with the row of the earliest point as the reference row."""
    reference = min(range(len(rows)), key=lambda p: rows[p][0])
    best: tuple[list[int], float] = [], math.inf
    for time in rows[reference]:
        nearest = [min(range(len(row)), key=lambda i: abs(row[i] - time)) for row in rows]
        chosen = [row[i] for row, i in zip(rows, nearest, strict=True)]
        if max(chosen) - min(chosen) < best[1]:
            best = nearest, max(chosen) - min(chosen)
    return best


def table(source: random.Random, workers: int, lookahead: int) -> Rows:
    """Draws a table of few integers (many ties), of any floats, or of steady workers' pushes."""
    kind = source.randrange(3)
    if kind == 2:
        begin = source.choice((0.0, 1e6))
        steps = [source.uniform(0.5, 3.0) for _ in range(workers)]
        return [[begin + step * (i + 1) for i in range(lookahead)] for step in steps]
    most = source.choice((2, 5, 20, 100))
    draw = (lambda: float(source.randrange(-most, most))) if kind else source.random
    return [sorted(draw() for _ in range(lookahead)) for _ in range(workers)]


def check(rows: Rows, found: Any) -> None:
    """Checks that the result is consistent with the choice it describes."""
    assert found.indices.dtype == np.int64
    assert found.indices.shape == (len(rows),)
    chosen = [row[index] for row, index in zip(rows, found.indices.tolist(), strict=True)]
    assert found.barrier == max(chosen)
    assert found.spread == max(chosen) - min(chosen)


def test_exact_methods_against_every_choice() -> None:
    source = random.Random(0)
    for _ in range(1000):
        rows = table(source, source.randint(1, 4), source.randint(1, 5))
        least = smallest_spread(rows)
        for method in EXACT:
            found = zipline(rows, method)
            check(rows, found)
            assert found.spread == least, (method, rows)
        heuristic = zipline(rows, "grid")
        check(rows, heuristic)
        assert heuristic.spread >= least


def test_the_methods_in_order_choose_as_printed() -> None:
    source = random.Random(1)
    for _ in range(1000):
        rows = table(source, source.randint(1, 9), source.randint(1, 20))
        indices, spread = as_printed(rows)
        for method in IN_ORDER:
            found = zipline(rows, method)
            assert (found.indices.tolist(), found.spread) == (indices, spread), (method, rows)
        assert zipline(rows, "fullgrid").spread == spread


def test_the_heuristic_chooses_as_printed() -> None:
    source = random.Random(2)
    for _ in range(1000):
        rows = table(source, source.randint(1, 9), source.randint(1, 20))
        found = zipline(rows, "grid")
        assert (found.indices.tolist(), found.spread) == grid_as_printed(rows), rows


def test_a_thousand_workers_agree() -> None:
    times = np.random.default_rng(0).uniform(0.5, 1.5, (1000, 1)) * np.arange(1, 16)
    found = [zipline(times, method) for method in EXACT]
    assert len({one.spread for one in found}) == 1
    assert np.array_equal(found[0].indices, found[1].indices)
    assert np.array_equal(found[0].indices, found[2].indices)


def test_the_first_minimum_wins() -> None:
    """Both workers meet at 2 and again at 4."""
    for method in EXACT:
        found = zipline([[1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0]], method)
        assert (found.indices.tolist(), found.spread, found.barrier) == ([1, 0], 0.0, 2.0)


def test_the_heuristic_is_not_exact() -> None:
    rows = [[0.0, 90.0], [-1.0, 10.0], [10.0, 95.0], [1.0, 18.0]]
    assert zipline(rows).spread == smallest_spread(rows) == 10.0
    assert zipline(rows, "grid").spread == 11.0


@pytest.mark.parametrize("method", [*EXACT, "grid"])
def test_one_worker_and_one_time(method: Any) -> None:
    check([[3.0, 4.0]], zipline([[3.0, 4.0]], method))
    assert zipline([[3.0, 4.0]], method).indices.tolist() == [0]
    found = zipline([[3.0], [5.0], [1.0]], method)
    assert (found.indices.tolist(), found.spread, found.barrier) == ([0, 0, 0], 4.0, 5.0)


def test_the_argument_stays_as_it_is() -> None:
    times = np.array([[1.0, 2.0], [2.0, 3.0]])
    times.setflags(write=False)
    for method in (*EXACT, "grid"):
        zipline(times, method)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([[1.0, math.nan]], r"must be finite, got nan for worker 0 at index 1: leave out"),
        ([[1.0, 2.0], [1.0, math.inf]], r"must be finite, got inf for worker 1 at index 1"),
        ([[1.0, 2.0], [3.0, 2.5]], r"must ascend .* got 3.0 before 2.5 for worker 1 at index 0"),
        ([], r"shape \(workers, lookahead\), with at least one of each, got shape \(0,\)"),
        ([[], []], r"with at least one of each, got shape \(2, 0\)"),
        ([1.0, 2.0], r"with at least one of each, got shape \(2,\)"),
        ([[1.0], [1.0, 2.0]], r"times must be numbers .* as many for each worker"),
        ([["soon"]], r"times must be numbers"),
        (None, r"got shape \(\)"),
    ],
)
def test_bad_times(times: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zipline(times)


@pytest.mark.parametrize("method", ["ZipLine", None, "", []])
def test_an_unknown_method(method: Any) -> None:
    with pytest.raises(
        ValueError, match=r"there is no method .*zipline, opt, optbs, fullgrid, grid$"
    ):
        zipline([[1.0]], method)
