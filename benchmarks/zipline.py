"""How long does ZipLine search, by method, for n workers and R predicted pushes of each?

The server searches once at every barrier, so that a search must be far below an iteration. Prints
microseconds of thread CPU time (the least of some repeats) beside the figures of its authors.

    python benchmarks/zipline.py --workers 10 100 1000 --lookahead 15 150
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from lbbsp_core import zipline

METHODS = ("zipline", "opt", "optbs", "fullgrid", "grid")
# arXiv 2001.01347 and Machine Learning 2021: C++, Xeon E5-2620v3, microseconds
PAPER = {
    ("zipline", 10, 15): 149,
    ("zipline", 10, 150): 1_320,
    ("zipline", 100, 15): 6_370,
    ("zipline", 100, 150): 49_900,
    ("zipline", 1000, 15): 253_000,
    ("zipline", 1000, 150): 2_380_000,
    ("optbs", 1000, 15): 77_000,  # these two are read off a plot
    ("optbs", 1000, 150): 560_000,
}


def pushes(workers: int, lookahead: int, seed: int) -> np.ndarray:
    """Steady workers, the fastest four times as fast as the slowest, from now on."""
    source = np.random.default_rng(seed)
    return source.uniform(0.5, 2.0, (workers, 1)) * np.arange(1, lookahead + 1)


def microseconds(times: np.ndarray, method: str, budget_seconds: float) -> tuple[float, float]:
    """The least and the median."""
    spent: list[float] = []
    while len(spent) < 3 or (sum(spent) < budget_seconds and len(spent) < 1000):
        began = time.thread_time()
        zipline(times, method)  # type: ignore[arg-type]
        spent.append(time.thread_time() - began)
        if spent[0] > budget_seconds:
            break
    return 1e6 * min(spent), 1e6 * statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--lookahead", type=int, nargs="+", default=[15, 150])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for each figure")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    print("| n | R | method | least, µs | median, µs | paper, µs |")
    print("|---|---|---|---|---|---|")
    for workers in options.workers:
        for lookahead in options.lookahead:
            times = pushes(workers, lookahead, options.seed)
            least = zipline(times).spread
            for method in options.methods:
                if method != "grid":
                    assert zipline(times, method).spread == least
                low, median = microseconds(times, method, options.budget)
                paper = PAPER.get((method, workers, lookahead))
                shown = "" if paper is None else f"{paper:,}"
                row = f"| {workers:,} | {lookahead} | {method} | {low:,.0f} | {median:,.0f} |"
                print(f"{row} {shown} |", flush=True)


if __name__ == "__main__":
    main()
