"""Microseconds of a sample of the driving factors: wall and thread CPU time.

Run: python benchmarks/resources.py [--samples 2000]

Target: under 200 us a sample. *hot* is one sample after the other; *in a loop* comes after 60 ms of
matrix products, as in training, when the caches hold something else. Measure on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from lbbsp_core import ResourceSampler

TARGET = 200


def spent(sampler: ResourceSampler, samples: int, between: Callable[[], object]) -> np.ndarray:
    """Wall and thread CPU time of each sample, shape (2, samples), microseconds."""
    found = np.empty((2, samples))
    for k in range(samples):
        between()
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        sampler.sample()
        found[:, k] = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
    return found / 1e3


def step() -> None:
    """Some 60 ms of work that fills the caches."""
    end, a = time.perf_counter() + 0.06, np.ones((512, 512), np.float32)
    while time.perf_counter() < end:
        a = a @ a * 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2000)
    options = parser.parse_args()
    cases: list[tuple[str, tuple[str, ...] | None]] = [("default", None)]
    cases += [(name, (name,)) for name in ResourceSampler.available]
    cases += [("all", tuple(ResourceSampler.available))]
    print(f"{'':44}{'wall: median':>14}{'p99':>8}{'CPU: mean':>12}{'p99':>8}  us")
    for label, names in cases:
        with ResourceSampler(names) as sampler:
            for when, between, share in (("hot", lambda: None, 1), ("in a loop", step, 20)):
                wall, cpu = spent(sampler, options.samples // share, between)
                verdict = "ok" if cpu.mean() < TARGET and np.median(wall) < TARGET else "MISSED"
                print(
                    f"\n{label:34}{when:10}"
                    f"{np.median(wall):14.1f}{np.percentile(wall, 99):8.1f}"
                    f"{cpu.mean():12.1f}{np.percentile(cpu, 99):8.1f}  {verdict}",
                    end="",
                    flush=True,
                )
    print()


if __name__ == "__main__":
    main()
