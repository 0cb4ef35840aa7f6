"""Measures what becomes of batches in short steps: of equal and of unequal workers.

    python benchmarks/short_steps.py [--hogs 4] [--width 32] [--steps 600] [--repeats 3]
    python benchmarks/short_steps.py --speeds 1,1,0.4 --milliseconds 15

Two Keras workers train a small network with X = 256, beside processes that only compute; or, with
`--speeds`, workers of these speeds sleep instead of computing, as on accelerators, for so many
milliseconds in the slowest one's even batch. In turns, batches are even; they follow every
measurement (``short_step_seconds=0``); and they stay near even shares, as by default. Prints for
each the smallest and largest batch of worker 0 after the first 100 steps, the mean change from step
to step, and the median time of a step, over all repeats.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import numpy as np
from recorded import run_recorded

X, SKIPPED = 256, 100
MODES = ("even", "unbounded", "default")
HOG = "import time\nend = time.monotonic() + 300\nwhile time.monotonic() < end: pass"


def train(options: argparse.Namespace) -> None:
    """Trains as one of the workers."""
    import keras
    import tensorflow as tf

    import lbbsp_core
    import lbbsp_tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    chosen = {
        "even": {"policy": lbbsp_core.Even()},
        "unbounded": {"short_step_seconds": 0},
        "default": {},
    }[options.worker]
    balancer = lbbsp_tf.LoadBalancer(strategy, X, **chosen)
    random = np.random.default_rng(0)
    x = random.normal(size=(options.steps * X, 20)).astype("float32")
    y = random.integers(0, 10, len(x))
    seconds = 0.0  # of a sample
    if speeds := speeds_of(options):
        own = speeds[strategy.cluster_resolver.task_id]
        seconds = options.milliseconds / 1e3 * len(speeds) / X * min(speeds) / own

    def rest(x: np.ndarray) -> np.ndarray:
        time.sleep(len(x) * seconds)
        return x

    class Resting(keras.Sequential):
        def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
            x, y = data
            if seconds:
                x = tf.ensure_shape(tf.numpy_function(rest, [x], x.dtype), x.shape)
            return super().train_step((x, y))

    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(options.width, "relu"), keras.layers.Dense(10, "softmax")]
        model = Resting([keras.layers.Input((20,)), *layers])
        model.compile("sgd", "sparse_categorical_crossentropy")
    feed = balancer.dataset(x, y)  # one long epoch
    model.fit(feed, steps_per_epoch=options.steps, callbacks=[balancer], verbose=0)


def speeds_of(options: argparse.Namespace) -> list[float]:
    """Returns the speeds of workers that rest; none if they compute."""
    return [float(speed) for speed in options.speeds.split(",") if speed]


def run(mode: str, options: argparse.Namespace) -> tuple[list[int], list[float]]:
    """Runs a job; returns the batches of worker 0 and the seconds of the steps."""
    passed = ("width", "steps", "speeds", "milliseconds")
    arguments = [__file__, "--worker", mode, *(f"--{x}={getattr(options, x)}" for x in passed)]
    workers = len(speeds_of(options)) or 2
    hogs = [subprocess.Popen([sys.executable, "-c", HOG]) for _ in range(options.hogs)]
    try:
        job = run_recorded(arguments, workers, verbose=options.verbose, timeout=280)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    steps = job.steps[SKIPPED:]
    return [step.sizes[0] for step in steps], [step.wall_seconds for step in steps]


def main() -> None:
    """Runs the jobs in turns and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("hogs", 4), ("width", 32), ("steps", 600), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--speeds", default="", help="of workers that rest, such as 1,1,0.4")
    parser.add_argument("--milliseconds", type=float, default=15.0)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options)
        return
    runs: dict[str, list[tuple[list[int], list[float]]]] = {mode: [] for mode in MODES}
    for _ in range(options.repeats):
        for mode in MODES:
            runs[mode].append(run(mode, options))
    print("| batches | smallest | largest | mean change | ms a step (each run) |")
    print("|---|---|---|---|---|")
    for mode, found in runs.items():
        sizes = [size for batches, _ in found for size in batches]
        change = np.mean([np.abs(np.diff(batches)).mean() for batches, _ in found])
        times = ", ".join(f"{np.median(seconds) * 1e3:.1f}" for _, seconds in found)
        print(f"| {mode} | {min(sizes)} | {max(sizes)} | {change:.1f} | {times} |")


if __name__ == "__main__":
    sys.exit(main())
