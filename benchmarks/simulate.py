"""How long does a simulation of 1,000 iterations take, from ten workers to ten thousand?

Prints seconds of thread CPU time on one core for each batch-synchronous scheme, drawing the
cluster and the oracle included in columns of their own, and microseconds an iteration of a worker
for the schemes that run on events.

    python benchmarks/simulate.py --workers 10 100 1000 10000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

from lbbsp_core.sim import load_scenario, run_async, run_oracle, run_vectorised, synchroniser
from lbbsp_core.sim.experiment import POLICIES, arena_of, chosen_runs

EVENTS = 20_000  # iterations of workers, for each scheme that runs on events


def seconds(run: Callable[[], object]) -> tuple[object, float]:
    began = time.thread_time()
    result = run()
    return result, time.thread_time() - began


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
        arena, took = seconds(lambda: arena_of(scenario))  # noqa: B023
        times = [took, seconds(lambda: run_oracle(arena.cluster, arena.together))[1]]  # noqa: B023
        for run in runs:
            policy = POLICIES[run.policy].build(arena.cluster)
            planned = partial(run_vectorised, arena.cluster, arena.together, policy, run.predictor)
            times.append(seconds(planned)[1])
        cells = zip(names, times, strict=True)
        print(f"{workers:>8,}", *(f"{took:>{max(8, len(name))}.2f}" for name, took in cells))
    schemes = ("bsp", "ssp:3", "asp", "dssp:3:15", "elasticbsp:15")
    print(f"\n{'workers':>8}", *(f"{name:>14}" for name in schemes), " microseconds an iteration")
    for workers in options.workers:
        scenario = load_scenario(options.scenario).sized(workers)
        steps = max(2, EVENTS // workers)
        arena = arena_of(type(scenario)(**{**vars(scenario), "steps": steps}))
        times = [
            seconds(lambda: run_async(arena.cluster, arena.alone, synchroniser(name)))[1]  # noqa: B023
            for name in schemes
        ]
        print(f"{workers:>8,}", *(f"{1e6 * took / (steps * workers):>14.1f}" for took in times))


if __name__ == "__main__":
    main()
