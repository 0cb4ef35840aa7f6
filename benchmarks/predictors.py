"""Measures the thread CPU time of each predictor's update and forecast, and its state's size.

    python benchmarks/predictors.py [--updates 3000] [--memory-updates 100000]

Targets: Ema update < 10 us; Narx update + forecast < 500 us on average and 3 ms at the 99.9th
percentile, fitting included; Mixture < 1.5 ms on average. Other processes on the same core
increase CPU time through caches and clock speed: measure on an idle machine, with one BLAS thread
(OPENBLAS_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import math
import pickle
import time

import numpy as np

from lbbsp_core import Measurement, Predictor
from lbbsp_core.sim.backtest import contenders

TARGETS = {
    "ema0.2": (10, math.inf),
    "ema0.5": (10, math.inf),
    "narx": (500, 3000),
    "mixture": (1500, math.inf),
}
DRIVERS = 4


def measurements(count: int) -> list[Measurement]:
    """Returns bursty speeds around 100 with four driving factors, one of which is informative."""
    random = np.random.default_rng(0)
    busy = np.repeat(random.random(count // 5 + 1) < 0.4, 5)[:count]
    speeds = 100 * (1 - 0.4 * busy) * np.exp(random.normal(0, 0.05, count))
    others = random.normal(size=(count, DRIVERS - 1))
    return [
        Measurement(float(v), 1.0, (float(b), *map(float, d)))
        for v, b, d in zip(speeds, busy, others, strict=True)
    ]


def microseconds(predictor: Predictor, series: list[Measurement]) -> np.ndarray:
    """Returns the microseconds of each update and each forecast, shape (2, len(series))."""
    clock, state = time.thread_time_ns, predictor.init()
    elapsed = np.empty((2, len(series)))
    for k, measurement in enumerate(series):
        start = clock()
        predictor.predict(state, measurement.drivers)
        forecast_end = clock()
        state = predictor.update(state, measurement)
        elapsed[:, k] = clock() - forecast_end, forecast_end - start
    return elapsed / 1e3


def state_bytes(predictor: Predictor, updates: int) -> tuple[int, int]:
    """Returns the bytes of the pickled state after a tenth of the updates, and after all."""
    series, state, first = measurements(1000), predictor.init(), 0
    for k in range(updates):
        if k == updates // 10:
            first = len(pickle.dumps(state))
        state = predictor.update(state, series[k % 1000])
    return first, len(pickle.dumps(state))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument(
        "--memory-updates",
        type=int,
        default=0,
        help="updates before the state is measured; 0: do not measure",
    )
    parser.add_argument("--predictors", default=",".join(contenders()))
    options = parser.parse_args()
    series, predictors = measurements(options.updates), contenders()
    print(f"{'predictor':22}{'update':>10}{'predict':>10}{'sum':>10}{'p50':>10}{'p99.9':>10}  us")
    for name in options.predictors.split(","):
        update, predict = microseconds(predictors[name], series)
        both = update + predict
        mean, tail = TARGETS.get(name, (math.inf, math.inf))
        measured = update.mean() if name.startswith("ema") else both.mean()
        p999 = np.percentile(both, 99.9)
        verdict = "" if mean == math.inf else "ok" if measured < mean and p999 < tail else "MISSED"
        print(
            f"{name:22}{update.mean():10.1f}{predict.mean():10.1f}{both.mean():10.1f}"
            f"{np.median(both):10.1f}{p999:10.1f}  {verdict}",
            flush=True,
        )
        if options.memory_updates:
            first, last = state_bytes(predictors[name], options.memory_updates)
            print(f"{'':22}state: {first} bytes, after {options.memory_updates} updates {last}")


if __name__ == "__main__":
    main()
