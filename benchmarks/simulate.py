"""Measures how long a simulation of 1,000 iterations takes, from ten workers to ten thousand.

Prints thread CPU seconds on one core for each policy under BSP, with the drawing of the cluster
and the oracle in separate columns, and microseconds per iteration of a worker for each
synchroniser that is simulated event by event.

    python benchmarks/simulate.py --workers 10 100 1000 10000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from lbbsp_core.registry import SYNCHRONISERS
from lbbsp_core.sim import Scenario, load_scenario, run_async, run_bsp, run_oracle
from lbbsp_core.sim.experiment import build_policy, chosen_runs, experiment_of

T = TypeVar("T")

EVENTS = 20_000  # iterations of workers, for each synchroniser that runs on events


def seconds(run: Callable[[], T]) -> tuple[T, float]:
    start = time.thread_time()
    result = run()
    return result, time.thread_time() - start


def policy_seconds(
    scenario: str, workers: int, steps: int, policies: Sequence[str] | None = None
) -> list[float]:
    """Returns the seconds of drawing the cluster, of the oracle, and of each policy under BSP."""
    experiment, took = seconds(lambda: experiment_of(sized(scenario, workers, steps)))
    cluster, config = experiment.cluster, experiment.together
    times = [took, seconds(lambda: run_oracle(cluster, config))[1]]
    for run in chosen_runs(policies, ["ema0.5"]):
        policy = build_policy(run.policy, cluster)
        planned = partial(run_bsp, cluster, config, policy, run.predictor)
        times.append(seconds(planned)[1])
    return times


def event_microseconds(scenario: str, workers: int, syncs: Sequence[str]) -> list[float]:
    """Returns the microseconds per iteration of a worker, for each synchroniser."""
    steps = max(2, EVENTS // workers)
    experiment = experiment_of(sized(scenario, workers, steps))
    runs = [
        partial(run_async, experiment.cluster, experiment.alone, SYNCHRONISERS.build(name))
        for name in syncs
    ]
    return [1e6 * seconds(run)[1] / (steps * workers) for run in runs]


def sized(scenario: str, workers: int, steps: int) -> Scenario:
    return replace(load_scenario(scenario).sized(workers), steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--scenario", default="markov")
    options = parser.parse_args()
    names = ["draw", "oracle", *(run.policy for run in chosen_runs(None, ["ema0.5"]))]
    print(f"{'workers':>8}", *(f"{name:>{max(8, len(name))}}" for name in names))
    for workers in options.workers:
        times = policy_seconds(options.scenario, workers, options.steps)
        cells = zip(names, times, strict=True)
        print(f"{workers:>8,}", *(f"{took:>{max(8, len(name))}.2f}" for name, took in cells))
    syncs = ("bsp", "ssp:3", "asp", "dssp:3:15", "elasticbsp:15")
    print(f"\n{'workers':>8}", *(f"{name:>14}" for name in syncs), " microseconds per iteration")
    for workers in options.workers:
        times = event_microseconds(options.scenario, workers, syncs)
        print(f"{workers:>8,}", *(f"{took:>14.1f}" for took in times))


if __name__ == "__main__":
    main()
