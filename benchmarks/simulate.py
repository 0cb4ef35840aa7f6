"""Measures how long a simulation of 1,000 iterations takes, from ten workers to ten thousand.

Prints thread CPU seconds on one core for each policy under BSP, with the drawing of the cluster
and the oracle in separate columns, and microseconds per iteration of a worker for each
synchroniser that is simulated event by event.

    python benchmarks/simulate.py --workers 10 100 1000 10000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

from lbbsp_core.sim import load_scenario, run_async, run_oracle, run_vectorised, synchroniser
from lbbsp_core.sim.experiment import build_policy, chosen_runs, experiment_of

EVENTS = 20_000  # iterations of workers, for each synchroniser that runs on events


def seconds(run: Callable[[], object]) -> tuple[object, float]:
    start = time.thread_time()
    result = run()
    return result, time.thread_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--scenario", default="markov")
    options = parser.parse_args()
    runs = chosen_runs(None, ["ema0.5"])
    names = ["draw", "oracle", *(run.policy for run in runs)]
    print(f"{'workers':>8}", *(f"{name:>{max(8, len(name))}}" for name in names))
    for workers in options.workers:
        scenario = load_scenario(options.scenario).sized(workers)
        scenario = type(scenario)(**{**vars(scenario), "steps": options.steps})
        experiment, took = seconds(lambda: experiment_of(scenario))  # noqa: B023
        times = [took, seconds(lambda: run_oracle(experiment.cluster, experiment.together))[1]]  # noqa: B023
        for run in runs:
            policy = build_policy(run.policy, experiment.cluster)
            planned = partial(
                run_vectorised, experiment.cluster, experiment.together, policy, run.predictor
            )
            times.append(seconds(planned)[1])
        cells = zip(names, times, strict=True)
        print(f"{workers:>8,}", *(f"{took:>{max(8, len(name))}.2f}" for name, took in cells))
    syncs = ("bsp", "ssp:3", "asp", "dssp:3:15", "elasticbsp:15")
    print(f"\n{'workers':>8}", *(f"{name:>14}" for name in syncs), " microseconds per iteration")
    for workers in options.workers:
        scenario = load_scenario(options.scenario).sized(workers)
        steps = max(2, EVENTS // workers)
        experiment = experiment_of(type(scenario)(**{**vars(scenario), "steps": steps}))
        times = [
            seconds(lambda: run_async(experiment.cluster, experiment.alone, synchroniser(name)))[1]  # noqa: B023
            for name in syncs
        ]
        print(f"{workers:>8,}", *(f"{1e6 * took / (steps * workers):>14.1f}" for took in times))


if __name__ == "__main__":
    main()
