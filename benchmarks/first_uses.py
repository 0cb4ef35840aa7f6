"""Measures what it costs if the first step of a worker with a batch size takes longer, as on GPUs.

    python benchmarks/first_uses.py [--penalties 0 0.05 0.5] [--steps 160] [--repeats 1]

Four Keras workers of relative speeds 1, 1, 0.6 and 0.3 with X = 512 sleep instead of computing, so
that balanced steps take 160 ms (even ones 387 ms), with noise of 1 %; a step with a batch size that
is new to its worker takes a penalty longer. In turns, first uses are learned from as all other
steps, and changes are free ("before"); and they are as by default. Prints for each the mean step
after the first 20, how many batch sizes all workers have run, and the changes of plan.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np
from recorded import run_recorded

X, SKIPPED, BALANCED_SECONDS = 512, 20, 0.16
SPEEDS = (1.0, 1.0, 0.6, 0.3)


def train(options: argparse.Namespace) -> None:
    """Trains as one of the workers."""
    import keras
    import tensorflow as tf

    import lbbsp_tf
    from lbbsp_core.policy import FirstUses

    if options.worker == "before":
        FirstUses.measured = lambda self, size, busy_seconds, forecast: busy_seconds  # type: ignore[method-assign]
        FirstUses.extra_seconds = property(lambda self: 0.0)  # type: ignore[assignment]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    balancer = lbbsp_tf.LoadBalancer(strategy, X)
    rank = strategy.cluster_resolver.task_id
    random = np.random.default_rng(rank)
    seconds = sum(SPEEDS) / SPEEDS[rank] * BALANCED_SECONDS / X  # of a sample
    known: set[int] = set()

    def compute(x: np.ndarray) -> np.ndarray:
        penalty = options.penalty * (len(x) not in known)
        known.add(len(x))
        time.sleep(len(x) * seconds * (1 + 0.01 * random.standard_normal()) + penalty)
        return x

    class Slow(keras.Sequential):
        def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
            x, y = data
            slow = tf.ensure_shape(tf.numpy_function(compute, [x], x.dtype), x.shape)
            return super().train_step((slow, y))

    x = np.ones((options.steps * X, 4), "float32")
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = Slow([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    feed = balancer.dataset(x, x[:, :1])  # one long epoch
    model.fit(feed, steps_per_epoch=options.steps, callbacks=[balancer], verbose=0)


def run(mode: str, penalty: float, options: argparse.Namespace) -> tuple[float, int, int]:
    """Runs a job; returns the mean step in seconds, different sizes, and changes of plan."""
    given = ["--worker", mode, "--penalty", str(penalty), "--steps", str(options.steps)]
    job = run_recorded([__file__, *given], len(SPEEDS), verbose=options.verbose, timeout=580)
    steps = job.steps
    plans = [step.sizes for step in steps]
    return (
        float(np.mean([step.wall_seconds for step in steps[SKIPPED:]])),
        sum(len(set(sizes)) for sizes in zip(*plans, strict=True)),
        sum(one != other for one, other in itertools.pairwise(plans)),
    )


def main() -> None:
    """Runs the jobs in turns and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--penalties", type=float, nargs="+", default=[0.0, 0.05, 0.5])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--penalty", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options)
        return
    print("| penalty | first uses | ms a step | sizes | changes |")
    print("|---|---|---|---|---|", flush=True)
    for _ in range(options.repeats):
        for penalty, mode in itertools.product(options.penalties, ("before", "default")):
            seconds, sizes, changes = run(mode, penalty, options)
            print(
                f"| {penalty:g} s | {mode} | {seconds * 1e3:.0f} | {sizes} | {changes} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
