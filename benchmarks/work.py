"""Balance of equal workers on sequences of different lengths, cut by count and by work.

Three worker processes of equal CPU quotas train a network that reads only the tokens of its
sequences, with lognormal lengths (sigma 1) and 16 sequences per worker. Four kinds of runs take
turns: even batches and LB-BSP, each without and with ``work=lengths``. Prints, from the run
records, without the first steps:

- balance: mean / largest busy time of the workers, the median over steps, and in total (the sum of
  the means over the sum of the largest);
- the wall time of a step, in the mean;
- microseconds in which a worker cuts a step, without and with a limit that binds.
"""

from __future__ import annotations

import argparse
from functools import partial
from timeit import repeat
from typing import TYPE_CHECKING

import numpy as np
from recorded import run_recorded

if TYPE_CHECKING:
    from lbbsp_core.runtime.record.record import StepLine

WORKERS, X, MEDIAN_TOKENS, WARM_UP = 3, 48, 40, 5
KINDS = ("even by count", "even by work", "lbbsp by count", "lbbsp by work")


def sequences(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens (0 is padding), shape ``(samples, longest)``, and lengths, seeded."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(MEDIAN_TOKENS), 1.0, steps * X).astype(int).clip(4, 1024)
    tokens = rng.integers(1, 1000, (len(lengths), lengths.max()))
    return np.where(np.arange(lengths.max()) < lengths[:, None], tokens, 0), lengths


def train(kind: str, steps: int, width: int) -> None:
    """Trains as one of the workers."""
    import keras
    import tensorflow as tf

    import lbbsp_core
    import lbbsp_tf

    class Reader(keras.Model):
        """Reads the tokens of all sequences side by side."""

        def __init__(self) -> None:
            super().__init__()
            hidden = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
            self.of_tokens = keras.Sequential([keras.layers.Embedding(1000, width), *hidden])
            self.of_sequences = keras.layers.Dense(10)

        def call(self, tokens: tf.Tensor) -> tf.Tensor:
            """Returns the logits of sequences, shape ``(sequences, 10)``."""
            places = tf.where(tokens > 0)
            read = self.of_tokens(tf.gather_nd(tokens, places))
            means = tf.math.unsorted_segment_mean(read, places[:, 0], tf.shape(tokens)[0])
            return self.of_sequences(means)

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    policy = lbbsp_core.Even() if kind.startswith("even") else None
    balancer = lbbsp_tf.LoadBalancer(strategy, X, policy=policy)
    tokens, lengths = sequences(steps)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = Reader()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss)
    work = lengths if kind.endswith("work") else None
    feed = balancer.dataset(tokens, lengths % 10, seed=0, work=work)
    model.fit(feed, steps_per_epoch=balancer.steps_per_epoch, callbacks=[balancer], verbose=0)


def print_cuts() -> None:
    """Prints the time of a cut, the fastest of several."""
    from lbbsp_core import Limits
    from lbbsp_core.work import Work

    rng = np.random.default_rng(0)
    work = Work(rng.lognormal(size=100_000), 100_000)
    for workers, size in ((8, 512), (64, 8192)):
        samples, share = rng.permutation(100_000)[:size], size // workers
        for name, limits in (("free", Limits()), ("at a limit", Limits(1, share + 1))):
            cut = partial(work.cut, samples, (share,) * workers, [limits] * workers)
            seconds = min(repeat(cut, number=5, repeat=20)) / 5
            print(f"cut of {size} samples for {workers} workers, {name}: {1e6 * seconds:.0f} us")


def run(kind: str, options: argparse.Namespace) -> list[StepLine]:
    """Launches the workers and returns the steps of their record after the first ones."""
    given = ["--worker", kind, "--steps", str(options.steps), "--width", str(options.width)]
    job = run_recorded(
        [__file__, *given], WORKERS, verbose=options.verbose, speeds=(1.0,) * WORKERS, timeout=200
    )
    return [line for line in job.steps[WARM_UP:] if line.is_regular]


def main() -> None:
    """Runs all kinds in turn and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.worker:
        train(options.worker, options.steps, options.width)
        return

    steps: dict[str, list[StepLine]] = {kind: [] for kind in KINDS}
    for number in range(options.rounds):
        for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
            steps[kind] += run(kind, options)
    print(f"{WORKERS} equal workers, X = {X}, {options.rounds} runs of {options.steps} steps each")
    print(f"{'':<16}{'balance, median':>16}{'in total':>10}{'step':>11}")
    for kind, lines in steps.items():
        busy = np.array([line.busy_seconds for line in lines])
        mean, largest = busy.mean(axis=1), busy.max(axis=1)
        wall = np.mean([line.wall_seconds for line in lines])
        print(
            f"{kind:<16}{np.median(mean / largest):>16.3f}{mean.sum() / largest.sum():>10.3f}"
            f"{1e3 * wall:>8.1f} ms"
        )
    print_cuts()


if __name__ == "__main__":
    main()
