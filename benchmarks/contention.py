"""Compares predictors in one job of real workers with neighbours that start and stop.

    python benchmarks/contention.py [--steps 1500] [--contention bursty:1 | quiet | TRACE]

Three Keras workers with equal CPU quotas train with X = 192; one or two processes compete with each
of them for its quota, at random times (`lbbsp launch --contention bursty:1`). All predictors learn
from all steps, and take turns of ten steps in deciding the plans, so that they meet the same
neighbours. Prints for each predictor

- its RMSE of speed / mean speed, one step ahead, on all steps of the job (`lbbsp evaluate
  --from-run`), of all workers together;
- the balance efficiency in its own steps: the time in which workers of the measured speeds would
  have finished together, over the busy time of the slowest one;
- the time of its steps over that same time, with communication, at which speeds do not matter;
- the mean time of its steps, which depends on the speeds in them.

The intervals of 90 % are from resampling the turns.

With `--policy bsp` the batches stay even, and only the errors say something. `--trace FILE`
writes the speeds and the driving factors of the job as a trace.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

    from lbbsp_core.predict import Predictor
    from lbbsp_core.runtime.record.record import Run, StepLine
    from lbbsp_core.types import Measurement

NAMES = ("last", "ema0.5", "narx-without-drivers", "narx", "mixture")
TURN = 10
"""Steps in which the same predictor decides."""
X = 192
WARM_UP = 5
"""The first 1 / WARM_UP of the steps is learned from, but not scored."""


@dataclass
class TakingTurns:
    """Predictor whose forecasts are those of another one in each turn; all of them learn.

    Args:
        predictors: Predictors, in the order of `NAMES`.
        step: Step that is running. Its forecasts, of which it may make several, are for the next.
    """

    predictors: tuple[Predictor, ...]
    step: int = field(default=0, repr=False)

    def init(self) -> tuple[Any, ...]:
        """Returns the states of all predictors."""
        return tuple(each.init() for each in self.predictors)

    def update(self, state: tuple[Any, ...], measurement: Measurement) -> tuple[Any, ...]:
        """Lets all predictors learn."""
        pairs = zip(self.predictors, state, strict=True)
        return tuple(each.update(own, measurement) for each, own in pairs)

    def predict(
        self, state: tuple[Any, ...], drivers: tuple[float, ...] = (), horizon: int = 1
    ) -> float:
        """Returns the forecast of the predictor that decides the plan of the next step."""
        turn = turn_of(self.step + 1)
        return float(self.predictors[turn].predict(state[turn], drivers, horizon))


def turn_of(step: int) -> int:
    """Returns the number of the predictor that decides the plan of a step."""
    return step // TURN % len(NAMES)


def train(
    options: argparse.Namespace, predictor: Predictor | None = None
) -> tf.distribute.Strategy:
    """Trains as one of the workers, and returns its strategy; predictors take turns by default."""
    import keras
    import tensorflow as tf
    from networks import SAMPLES, convolutional, data

    import lbbsp_core
    import lbbsp_tf
    from lbbsp_core.sim.backtest import contenders

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    chosen = {
        "bsp": lbbsp_core.LoadBalanced(interval=10**9),  # forecasts that no plan follows
        "lbbsp": lbbsp_core.LoadBalanced(min_gain=0),
    }[options.policy]
    predictors = contenders(1)
    turns = TakingTurns(tuple(predictors[name] for name in NAMES))
    balancer = lbbsp_tf.LoadBalancer(
        strategy,
        X,
        policy=chosen,
        predictor=predictor or turns,
    )
    x, y = data()
    order = np.arange(options.steps * X) % SAMPLES  # one long epoch
    feed = balancer.dataset(x[order], y[order])
    count = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda step, logs: setattr(turns, "step", step)
    )
    convolutional(strategy, options.channels).fit(
        feed, steps_per_epoch=balancer.steps_per_epoch, callbacks=[balancer, count], verbose=0
    )
    return strategy


def run(options: argparse.Namespace, folder: Path, script: str = __file__) -> Run:
    """Launches the workers, which run `script`, and returns their record."""
    from lbbsp_core import read_run
    from lbbsp_core.cli.contention import parse_contention
    from lbbsp_core.launch import launch

    quiet = options.contention == "quiet"
    workers, cores = options.workers, len(os.sched_getaffinity(0))
    status = launch(
        [script, "--worker", "--policy", options.policy, "--steps", str(options.steps),
         "--channels", str(options.channels)],
        workers=workers,
        speeds=(1,) * workers if workers > cores else None,
        contention=None if quiet else parse_contention(options.contention, workers),
        run_dir=folder,
        timeout=1800,
        output=lambda rank, line: options.verbose and print(f"[{rank}] {line}"),
    )  # fmt: skip
    if status:
        sys.exit(f"the workers failed with status {status}: --verbose shows their output")
    return read_run(folder)


def ideal_seconds(line: StepLine) -> float:
    """Returns the seconds in which the workers of a step would have finished together."""
    busy, sizes = np.array(line.busy_seconds), np.array(line.sizes)
    return float(sizes.sum() / (sizes / busy).sum())


class Figures(NamedTuple):
    """What a predictor achieved in its own steps."""

    efficiency: float
    efficiency_interval: tuple[float, float]
    ratio: float
    """Time of a step, over the time in which the workers would have finished together."""
    ratio_interval: tuple[float, float]
    mean_seconds: float


def figures(run: Run) -> dict[str, Figures]:
    """Returns what each predictor achieved, by name."""
    turns: dict[int, list[tuple[float, float, float]]] = {}
    for line in run.steps[len(run.steps) // WARM_UP :]:
        if not line.is_regular:
            continue
        seconds = ideal_seconds(line), max(line.busy_seconds), line.wall_seconds
        turns.setdefault(line.step // TURN, []).append(seconds)
    found = {}
    rng = np.random.default_rng(0)
    for number, name in enumerate(NAMES):
        own = [rows for turn, rows in turns.items() if turn % len(NAMES) == number]
        sums = np.array([np.sum(rows, axis=0) for rows in own])
        drawn = sums[rng.integers(len(sums), size=(2000, len(sums)))].sum(axis=1)
        ideal, slowest, wall = sums.sum(axis=0)
        found[name] = Figures(
            ideal / slowest,
            tuple(np.percentile(drawn[:, 0] / drawn[:, 1], (5, 95))),
            wall / ideal,
            tuple(np.percentile(drawn[:, 2] / drawn[:, 0], (5, 95))),
            wall / sum(map(len, own)),
        )
    return found


def job_parser(
    description: str,
    *,
    steps: int,
    policies: Sequence[str] = ("lbbsp", "bsp"),
    policy: str | None = "lbbsp",
    contention: str = "bursty:1",
) -> argparse.ArgumentParser:
    """Returns a parser of the options that `train` and `run` read; arguments are its defaults.

    Only the first line of the description, a script's docstring, is shown.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.set_defaults(workers=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--channels", type=int, default=40)
    parser.add_argument("--policy", choices=policies, default=policy)
    parser.add_argument("--contention", default=contention)
    parser.add_argument("--verbose", action="store_true")
    return parser


def main() -> None:
    """Runs the job and prints the figures."""
    parser = job_parser(__doc__, steps=1500)
    parser.add_argument("--trace", type=Path, help="write the job's speeds and drivers here")
    options = parser.parse_args()
    if options.worker:
        train(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        report(run(options, Path(folder)), Path(folder), options)


def report(record: Run, folder: Path, options: argparse.Namespace) -> None:
    """Prints the table, and writes the trace."""
    from lbbsp_core.sim.backtest import contenders, evaluate
    from lbbsp_core.sim.from_run import trace_from_run
    from lbbsp_core.sim.traces import write_trace

    trace = trace_from_run(folder)
    if options.trace:
        write_trace(options.trace, trace)
    predictors = contenders(1)
    (scores,) = evaluate(
        [trace], predictors={name: predictors[name] for name in NAMES}
    ).scores.values()
    walls = [line.wall_seconds for line in record.steps]
    print(f"{options.contention}, {options.policy}: {len(walls)} steps of {np.median(walls):.3f} s")
    print("| predictor | RMSE | efficiency | 90 % | step / ideal | 90 % | mean step |")
    print("|---|---|---|---|---|---|---|")
    for name, own in figures(record).items():
        (low, high), (shortest, longest) = own.efficiency_interval, own.ratio_interval
        cells = [
            *(f"{scores[name].rmse:.4f}", f"{own.efficiency:.3f}", f"{low:.3f} to {high:.3f}"),
            *(f"{own.ratio:.3f}", f"{shortest:.3f} to {longest:.3f}", f"{own.mean_seconds:.3f} s"),
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
