"""Compares the speed-up that a run estimates of itself with the one that is measured.

    python benchmarks/estimates.py [--pairs 2] [--steps 100] [--only NAME]

Each of ten jobs trains as LB-BSP, and with even batches, in turns. Prints for each job

- the estimated range, from the records of LB-BSP alone: the lowest and the highest end of its runs;
- the measured ratio of the samples per second, the median and the range of the pairs;
- whether the estimated range has the median, give or take the spread of the pairs.

The first fifth of the steps does not count. Workers of the *computing* job train convolutions, with
CPU quotas in the proportion of their speeds. Those of the others sleep on the emulated devices of
`sharing.py`, so that other processes of the machine disturb them little.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from contention import WARM_UP
from emulated_device import PHASE_STEPS, Device
from recorded import run_recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lbbsp_core.runtime.record.record import StepLine

X = 192
SAME = 0.05
"""Least spread of pairs that is believed."""


class Job(NamedTuple):
    """Job of unequal or equal workers."""

    speeds: Sequence[float] = (1, 1, 0.4)
    milliseconds: float = 100.0
    """Time in which the slowest worker sleeps in an even batch, besides its fixed part."""
    fixed: float = 0.0
    """Fixed part of a worker's time, in even batches."""
    channels: int = 0
    """Channels of the convolutions of a worker that computes; 0: it sleeps."""
    weights: int = 0
    """Weights whose gradients are exchanged besides those of a small network, in thousands."""
    seed: int | None = None
    """Of the neighbours with which workers share their devices; None: there are none."""
    gluon: bool = False

    def device(self, rank: int) -> Callable[[int], None]:
        """Returns a function that sleeps as long as a worker needs for so many samples."""
        even, seconds = X / len(self.speeds), self.milliseconds / 1e3
        own = seconds / even * min(self.speeds) / self.speeds[rank]
        device = Device(own, rank, self.seed, PHASE_STEPS * seconds)
        return lambda samples: device.sleep(samples + self.fixed * even)


JOBS = {
    "Keras, three unequal workers": Job(),
    "Keras, two unequal workers": Job(speeds=(1, 0.4)),
    "Keras, equal workers": Job(speeds=(1, 1, 1)),
    "Keras, short steps": Job(milliseconds=20),
    "Keras, much communication": Job(weights=4000),
    "Keras, affine cost": Job(milliseconds=60, fixed=0.5),
    "Keras, computing": Job(channels=16),
    "Keras, equal workers beside neighbours": Job(speeds=(1, 1, 1), seed=1),
    "gluon, three unequal workers": Job(gluon=True),
    "gluon, affine cost": Job(milliseconds=60, fixed=0.5, gluon=True),
}


def train(job: Job, steps: int, policy: str) -> None:
    """Trains a job of Keras as one of the workers."""
    import keras
    import tensorflow as tf
    from networks import SAMPLES, convolutional, data

    import lbbsp_tf
    from lbbsp_core import registry

    device = job.device(int(json.loads(os.environ["TF_CONFIG"])["task"]["index"]))
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    balancer = lbbsp_tf.LoadBalancer(strategy, X, policy=registry.POLICIES.build(policy))

    def rest(x: np.ndarray) -> np.ndarray:
        device(len(x))
        return x

    class Resting(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(rest, [x], x.dtype), x.shape)

    if job.channels:
        (x, y), model = data(), convolutional(strategy, job.channels)
    else:
        x, y = np.zeros((SAMPLES, 20), "f4"), np.zeros(SAMPLES, int)
        layers = keras.layers
        with strategy.scope():
            parts = [layers.Dense(max(job.weights, 1) * 10, "relu"), layers.Dense(10)]
            model = keras.Sequential([layers.Input((20,)), Resting(), *parts])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss)
    order = np.arange(steps * X) % SAMPLES  # one long epoch
    feed = balancer.dataset(x[order], y[order])
    model.fit(feed, steps_per_epoch=steps, callbacks=[balancer], verbose=0)


def train_gluon(job: Job, steps: int, policy: str) -> None:
    """Trains a job of gluon as one of the workers."""
    import lbbsp_mx

    import mxnet as mx  # isort: skip
    from mxnet import autograd, gluon

    from lbbsp_core import registry

    net = gluon.nn.Dense(10, in_units=20)
    net.initialize(mx.init.Zero())
    trainer = lbbsp_mx.Trainer(net.collect_params(), "sgd", global_batch_size=X,
                               policy=registry.POLICIES.build(policy))  # fmt: skip
    loss_of, device = gluon.loss.SoftmaxCrossEntropyLoss(), job.device(trainer.kvstore.rank)
    for indices in trainer.batch_sampler(steps * X, seed=0):  # one long epoch
        x, y = mx.nd.zeros((len(indices), 20)), mx.nd.zeros(len(indices))
        device(len(indices))
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(len(indices))


def run(name: str, policy: str, options: argparse.Namespace) -> list[StepLine]:
    """Runs a job, and returns its steps without the first ones."""
    job = JOBS[name]
    lines = run_recorded(
        [__file__, "--worker", policy, "--only", name, "--steps", str(options.steps)],
        len(job.speeds),
        verbose=options.verbose,
        speeds=job.speeds if job.channels else None,
        framework="mxnet" if job.gluon else "tensorflow",
        timeout=300,
    ).steps
    return lines[len(lines) // WARM_UP :]


def compare(name: str, options: argparse.Namespace) -> bool:
    """Runs the pairs of a job, prints its row, and returns whether the range has the ratio."""
    from lbbsp_core.runtime.record.figures import figures_of

    low, high, ratios = math.inf, 0.0, []
    for pair in range(options.pairs):
        policies = ("bsp", "lbbsp") if pair % 2 else ("lbbsp", "bsp")
        lines = {policy: run(name, policy, options) for policy in policies}
        seconds = {policy: fmean(x.wall_seconds for x in lines[policy]) for policy in policies}
        ratios.append(seconds["bsp"] / seconds["lbbsp"])
        figures = figures_of(lines["lbbsp"])
        assert figures is not None, "steps take time"
        low, high = min(low, figures.speedup), max(high, figures.speedup_at_most)
    is_inside = holds(low, high, ratios)
    estimated, spread = f"{low:.2f} to {high:.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"
    cells = name, estimated, f"{median(ratios):.2f}", spread, "inside" if is_inside else "outside"
    print(f"| {' | '.join(cells)} |", flush=True)
    return is_inside


def holds(low: float, high: float, ratios: Sequence[float]) -> bool:
    """Returns whether a range has the median of ratios, give or take their spread.

    Two runs that do the same differ by as much.
    """
    spread = max(max(ratios) - min(ratios), SAME)
    return low - spread <= median(ratios) <= high + spread


def main() -> None:
    """Runs the jobs and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--only", choices=JOBS, metavar="NAME", help="of one job")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        job = JOBS[options.only]
        (train_gluon if job.gluon else train)(job, options.steps, options.worker)
        return
    print("| job | estimated | measured | of the pairs | |")
    print("|---|---|---|---|---|")
    names = [options.only] if options.only else list(JOBS)
    inside = sum(compare(name, options) for name in names)
    print(
        f"\n{inside} of {len(names)} inside: the range, give or take the spread of the pairs (at "
        f"least {SAME}), has the median. Load of the machine: {os.getloadavg()[1]:.1f}."
    )


if __name__ == "__main__":
    sys.exit(main())
