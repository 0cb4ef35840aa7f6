"""Measures how the time of one allocation grows with the number of workers.

Every worker computes the plan in every training step, so an allocation must be much shorter than
a step, and must not grow faster than the cluster. Prints the median thread CPU time over many
repeats, cost objects included (reading them is part of the call), and the ratio to the previous
size: growth is linear if the ratio of times equals the ratio of workers.

    python benchmarks/allocate.py --sizes 10 1000 100000
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from lbbsp_core import Affine, Cost, Limits, Profile, Proportional, Saturating, allocate

SAMPLES = 64  # per worker, on average


def affine(rng: random.Random) -> Affine:
    return Affine(rng.uniform(0.0, 0.02), rng.uniform(0.001, 0.005))


def saturating(rng: random.Random) -> Saturating:
    overhead, slope = rng.uniform(0.0, 0.02), rng.uniform(0.001, 0.005)
    return Saturating(overhead + slope * rng.uniform(8, 48), overhead, slope)


def profile(rng: random.Random) -> Profile:
    batches, seconds = [8], [rng.uniform(0.02, 0.04)]
    while batches[-1] < 8 * SAMPLES:
        seconds.append(seconds[-1] + batches[-1] * rng.uniform(0.0005, 0.005))
        batches.append(2 * batches[-1])
    return Profile(batches, seconds)


def mixed(rng: random.Random) -> Cost:
    forms = (affine, saturating, profile, lambda rng: Proportional(rng.uniform(200.0, 1000.0)))
    return rng.choice(forms)(rng)


def median_seconds(costs: list, total: int, granularity: int, budget_seconds: float) -> float:
    limits = [Limits(1, 8 * SAMPLES)] * len(costs)
    times: list[float] = []
    while sum(times) < budget_seconds or len(times) < 5:
        start = time.thread_time()
        sizes = allocate(costs, total=total, limits=limits, granularity=granularity)
        times.append(time.thread_time() - start)
    assert sizes.sum() == total
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 1_000, 100_000])
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for each row")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    rng = random.Random(options.seed)
    print(f"{'costs':<22}{'workers':>9}{'median ms':>12}{'workers x':>11}{'time x':>9}")
    for name, form in (("affine", affine), ("mixed forms", mixed)):
        previous: tuple[int, float] | None = None
        for workers in options.sizes:
            costs = [form(rng) for _ in range(workers)]
            seconds = median_seconds(costs, SAMPLES * workers, 1, options.budget)
            ratios = "" if previous is None else ratio(workers, seconds, *previous)
            print(f"{name:<22}{workers:>9,}{1e3 * seconds:>12.3f}{ratios}")
            previous = workers, seconds

    for name, form, granularity, remainder in (
        ("affine, multiples of 8", affine, 8, 0),
        ("affine, with remainder", affine, 8, 3),
        ("mixed, multiples of 8", mixed, 8, 0),
    ):
        costs = [form(rng) for _ in range(1_000)]
        total = SAMPLES * len(costs) + remainder
        seconds = median_seconds(costs, total, granularity, options.budget)
        print(f"{name:<22}{len(costs):>9,}{1e3 * seconds:>12.3f}")


def ratio(workers: int, seconds: float, previous_workers: int, previous_seconds: float) -> str:
    return f"{workers / previous_workers:>11.1f}{seconds / previous_seconds:>9.1f}"


if __name__ == "__main__":
    main()
