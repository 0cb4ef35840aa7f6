"""Measures the time of a ZipLine search for n workers with R predicted pushes each, by method.

The server searches once at every barrier, so a search must be much shorter than an iteration.
Prints microseconds of thread CPU time (minimum and median of repeats) and the authors' figures.

    python benchmarks/zipline.py --workers 10 100 1000 --lookahead 15 150
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from lbbsp_core import zipline

METHODS = ("zipline", "opt", "optbs", "fullgrid", "grid")
# arXiv 2001.01347 (Table II) and Machine Learning 2021: C++, Xeon E5-2620v3, microseconds
PAPER = {
    ("zipline", 10, 15): 149,
    ("zipline", 10, 150): 1_320,
    ("zipline", 100, 15): 6_370,
    ("zipline", 100, 150): 49_900,
    ("zipline", 1000, 15): 253_000,
    ("zipline", 1000, 150): 2_380_000,
    ("optbs", 1000, 15): 77_000,  # these two are read off a plot
    ("optbs", 1000, 150): 560_000,
    ("fullgrid", 10, 15): 1_540,
    ("fullgrid", 10, 150): 46_700,
    ("fullgrid", 100, 15): 81_300,
    ("fullgrid", 100, 150): 2_150_000,
    ("fullgrid", 1000, 15): 4_040_000,
    ("fullgrid", 1000, 150): 207_000_000,
    ("grid", 10, 15): 168,
    ("grid", 10, 150): 5_500,
    ("grid", 100, 15): 1_110,
    ("grid", 100, 150): 43_800,
    ("grid", 1000, 15): 7_450,
    ("grid", 1000, 150): 257_000,
}


def pushes(workers: int, lookahead: int, seed: int) -> np.ndarray:
    """Returns predicted push times of steady workers, with speeds up to four times apart."""
    source = np.random.default_rng(seed)
    return source.uniform(0.5, 2.0, (workers, 1)) * np.arange(1, lookahead + 1)


def microseconds(times: np.ndarray, method: str, budget_seconds: float) -> tuple[float, float]:
    """Returns the minimum and the median over repeats."""
    elapsed: list[float] = []
    while len(elapsed) < 3 or (sum(elapsed) < budget_seconds and len(elapsed) < 1000):
        start = time.thread_time()
        zipline(times, method)  # type: ignore[arg-type]
        elapsed.append(time.thread_time() - start)
        if elapsed[0] > budget_seconds:
            break
    return 1e6 * min(elapsed), 1e6 * statistics.median(elapsed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--lookahead", type=int, nargs="+", default=[15, 150])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for each figure")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    print("| n | R | method | minimum, µs | median, µs | paper, µs |")
    print("|---|---|---|---|---|---|")
    for workers in options.workers:
        for lookahead in options.lookahead:
            times = pushes(workers, lookahead, options.seed)
            exact = zipline(times).spread
            for method in options.methods:
                if method != "grid":
                    assert zipline(times, method).spread == exact
                minimum, median = microseconds(times, method, options.budget)
                paper = PAPER.get((method, workers, lookahead))
                shown = "" if paper is None else f"{paper:,}"
                row = f"| {workers:,} | {lookahead} | {method} | {minimum:,.0f} | {median:,.0f} |"
                print(f"{row} {shown} |", flush=True)


if __name__ == "__main__":
    main()
