"""Compares when, and over which window, the driving factors of a worker's speed are read.

    python benchmarks/driver_windows.py [--steps 320] [--contention bursty:1]

The job of `contention.py`: three Keras workers under equal CPU quotas, with neighbours that start
and stop. A thread of each worker reads the counters every 10 ms. Afterwards NARX forecasts each
step from the speeds before it and from one driving factor, as it would have been sampled

- at the barrier, when the worker has computed its gradient: over the whole last step, or over its
  last 20 to 200 ms;
- after the barrier, when the worker leaves it, which would need another exchange before the next
  batch is drawn.

Prints the RMSE of speed / mean speed, and the balance efficiency of the plans, for each factor;
and the time of a gather that all workers start together.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import contention
import numpy as np

from lbbsp_core import LastValue, Measurement, Narx, Predictor
from lbbsp_core.runtime.record.record import Run

PERIOD_SECONDS, GATHERS = 0.01, 100
FACTORS = {"cgroup_other_percent": 1, "cpu_other_percent": 2, "throttled_percent": 3}
"""Columns of the counters: seconds since some time in the past; column 0 has the time."""

CASES: tuple[tuple[str, float | None], ...] = (
    ("barrier", None), ("barrier", 0.02), ("barrier", 0.05), ("barrier", 0.1), ("barrier", 0.2),
    ("after", 0.02), ("after", 0.05), ("after", 0.1), ("after", 0.2),
)  # fmt: skip


class Recorded(NamedTuple):
    """What a worker has recorded.

    Args:
        counters: Time and counters, shape ``(readings, 4)``, in seconds.
        reached: Time at which it reached the barrier of each step, in seconds.
        left: Time at which it left it.
        gathers: Seconds of gathers after the training.
    """

    counters: np.ndarray
    reached: np.ndarray
    left: np.ndarray
    gathers: np.ndarray


def record_worker(options: argparse.Namespace) -> None:
    """Trains as one of the workers, and records the counters and the times of its barriers."""
    from lbbsp_core.resources.host import Host
    from lbbsp_core.resources.sources import cgroup_cpu_time, cpu_throttling, cpu_time
    from lbbsp_core.runtime.planning.running_step import StepMeter

    host = Host(clock=time.perf_counter)
    sources = cgroup_cpu_time(host), cpu_time(host), cpu_throttling(host)
    rows: list[list[float]] = []
    times: dict[str, list[float]] = {"reach": [], "leave": []}

    def read() -> float:
        now = time.perf_counter()
        totals = [number for source in sources for number in source.read()]
        rows.append([now, *totals])
        return now

    def noted(name: str) -> None:
        original = getattr(StepMeter, name)

        def method(*arguments: object) -> object:
            result = original(*arguments)
            times[name].append(read())
            return result

        setattr(StepMeter, name, method)

    def keep_reading() -> None:
        while not ended.wait(PERIOD_SECONDS):
            read()

    noted("reach")
    noted("leave")
    ended = threading.Event()
    reader = threading.Thread(target=keep_reading, daemon=True)
    reader.start()
    strategy = contention.train(options)
    gathers = [seconds_of_gather(strategy) for _ in range(GATHERS)]
    ended.set()
    reader.join()
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    path = Path(os.environ["LBBSP_RUN_DIR"]) / f"counters-{rank}.npz"
    counters = np.array(sorted(rows))
    np.savez(path, counters=counters, reached=times["reach"], left=times["leave"], gathers=gathers)


def seconds_of_gather(strategy: Any) -> float:
    """Returns the seconds of a gather, after one that lets all workers start together."""
    from lbbsp_tf.exchange.collectives import mirrored_collectives

    collectives = mirrored_collectives(strategy)
    collectives.all_gather([0])
    start = time.perf_counter()
    collectives.all_gather([0])
    return time.perf_counter() - start


def driver(worker: Recorded, step: int, moment: str, window: float | None, factor: str) -> float:
    """Returns the factor in percent, as it would have been sampled at the barrier of a step."""
    end = (worker.reached if moment == "barrier" else worker.left)[step]
    start = worker.reached[step - 1] if window is None and step else end - (window or 0.1)
    column = worker.counters[:, FACTORS[factor]]
    before, after = np.interp([start, end], worker.counters[:, 0], column)
    return 100 * (after - before) / (end - start)


def series(
    run: Run, workers: Sequence[Recorded], moment: str, window: float | None, factor: str | None
) -> list[list[Measurement]]:
    """Returns the measurements of each worker, with the factor known before each step."""
    return [
        [
            Measurement(
                line.sizes[rank],
                line.busy_seconds[rank],
                () if factor is None else (driver(worker, line.step - 1, moment, window, factor),),
            )
            for line in run.steps
            if line.is_regular and line.step
        ]
        for rank, worker in enumerate(workers)
    ]


def figures(predictor: Predictor, found: Sequence[Sequence[Measurement]]) -> tuple[float, float]:
    """Returns RMSE / mean speed, averaged over workers, and efficiency; a fifth is not scored."""
    speeds = np.array([[each.samples_per_second for each in own] for own in found])
    forecasts = np.array([forecast(predictor, own) for own in found])
    scored = slice(speeds.shape[1] // contention.WARM_UP, None)
    speeds, forecasts = speeds[:, scored], forecasts[:, scored]
    errors = np.sqrt(((forecasts - speeds) ** 2).mean(axis=1)) / speeds.mean(axis=1)
    slowest = (forecasts / forecasts.sum(axis=0) / speeds).max(axis=0)
    return float(errors.mean()), float((1 / speeds.sum(axis=0)).sum() / slowest.sum())


def forecast(predictor: Predictor, measurements: Sequence[Measurement]) -> list[float]:
    """Returns a forecast for each iteration, made before it was learned from."""
    state, forecasts = predictor.init(), []
    for measurement in measurements:
        forecasts.append(float(predictor.predict(state, measurement.drivers)))
        state = predictor.update(state, measurement)
    return forecasts


def main() -> None:
    """Runs the job and prints the table."""
    parser = contention.job_parser(__doc__, steps=320)
    options = parser.parse_args()
    if options.worker:
        record_worker(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = contention.run(options, Path(folder), __file__)
        workers = [Recorded(**np.load(Path(folder) / f"counters-{rank}.npz")) for rank in range(3)]
    print("| factor | sampled | window | RMSE | efficiency |")
    print("|---|---|---|---|---|")
    without = series(run, workers, "barrier", None, None)
    for name, predictor in (("none: last value", LastValue()), ("none", Narx())):
        print("| {} | | | {:.4f} | {:.3f} |".format(name, *figures(predictor, without)))
    for factor in FACTORS:
        for moment, window in CASES:
            error, efficiency = figures(Narx(), series(run, workers, moment, window, factor))
            length = "the step" if window is None else f"{1000 * window:.0f} ms"
            print(f"| {factor} | {moment} | {length} | {error:.4f} | {efficiency:.3f} |")
    gathers, walls = workers[0].gathers, [line.wall_seconds for line in run.steps]
    print(f"a gather takes {1000 * np.median(gathers):.1f} ms, a step {np.median(walls):.3f} s")


if __name__ == "__main__":
    sys.exit(main())
