"""Measures the time of a sample of the driving factors: wall time and thread CPU time.

    python benchmarks/resources.py [--samples 2000]

Target: below 200 us per sample. *hot*: samples follow each other immediately. *in a loop*: each
sample follows 60 ms of matrix products, which evict its data from the caches, as in training. Run
it on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from lbbsp_core import ResourceSampler

TARGET_US = 200


def time_samples(
    sampler: ResourceSampler, samples: int, before_each: Callable[[], object]
) -> np.ndarray:
    """Returns wall and thread CPU time of each sample, shape (2, samples), in microseconds."""
    times = np.empty((2, samples))
    for k in range(samples):
        before_each()
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        sampler.sample()
        times[:, k] = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
    return times / 1e3


def compute() -> None:
    """Multiplies matrices for 60 ms, which fills the caches with other data."""
    end, a = time.perf_counter() + 0.06, np.ones((512, 512), np.float32)
    while time.perf_counter() < end:
        a = a @ a * 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=2000,
        help="Number of hot samples; a twentieth of it in a loop (default: 2000).",
    )
    options = parser.parse_args()
    cases: list[tuple[str, tuple[str, ...] | None]] = [("default", None)]
    cases += [(name, (name,)) for name in ResourceSampler.available]
    print(f"{'':44}{'wall: median':>14}{'p99':>8}{'CPU: mean':>12}{'p99':>8}  us")
    for label, names in cases:
        with ResourceSampler(names) as sampler:
            for mode, before_each, divisor in (
                ("hot", lambda: None, 1),
                ("in a loop", compute, 20),
            ):
                wall, cpu = time_samples(sampler, options.samples // divisor, before_each)
                is_fast = cpu.mean() < TARGET_US and np.median(wall) < TARGET_US
                verdict = "ok" if is_fast else "MISSED"
                print(
                    f"\n{label:34}{mode:10}"
                    f"{np.median(wall):14.1f}{np.percentile(wall, 99):8.1f}"
                    f"{cpu.mean():12.1f}{np.percentile(cpu, 99):8.1f}  {verdict}",
                    end="",
                    flush=True,
                )
    print()


if __name__ == "__main__":
    main()
