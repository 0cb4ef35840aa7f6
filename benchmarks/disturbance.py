"""Compares policies on real workers with the disturbance of the DBS paper (arXiv 2007.11831).

    python benchmarks/disturbance.py [--steps 400] [--contention dbs:1:8] [--policy NAME]

Three Keras workers with equal CPU quotas train with X = 192 in epochs of 20 steps. In each period
of 8 seconds, an epoch of the paper, a healthy worker becomes slow with probability 0.1, for 4 to 20
periods: a process takes a quarter to a half of its quota (`lbbsp launch --contention dbs:1:8`).
Each policy, or the one that is named, trains once, beside the same neighbours. Prints the steps
that each job made while the fastest one ran, over those of plain BSP, and the balance efficiency:
the time in which workers of the measured speeds would have finished together, over the busy time of
the slowest one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import contention
import numpy as np

if TYPE_CHECKING:
    from lbbsp_core.runtime.record.record import Run

EPOCH = 20
POLICIES = ("bsp", "dbs", "proportional", "lbbsp")


def train(options: argparse.Namespace) -> None:
    """Trains as one of the workers."""
    import tensorflow as tf
    from networks import SAMPLES, convolutional, data

    import lbbsp_tf
    from lbbsp_core import registry

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    policy = registry.POLICIES.build(options.policy)
    balancer = lbbsp_tf.LoadBalancer(strategy, contention.X, policy=policy)
    x, y = data()
    order = np.arange(EPOCH * contention.X) % SAMPLES
    convolutional(strategy, options.channels).fit(
        balancer.dataset(x[order], y[order]),
        epochs=options.steps // EPOCH,
        steps_per_epoch=balancer.steps_per_epoch,
        callbacks=[balancer],
        verbose=0,
    )


def efficiency(run: Run) -> float:
    """Returns the balance efficiency of all steps in which no measurement was excluded."""
    lines = [line for line in run.steps if line.is_regular]
    slowest = sum(max(line.busy_seconds) for line in lines)
    return sum(map(contention.ideal_seconds, lines)) / slowest


def main() -> None:
    """Runs the jobs and prints the table."""
    parser = contention.job_parser(
        __doc__, steps=400, policies=POLICIES, policy=None, contention="dbs:1:8"
    )
    options = parser.parse_args()
    if options.worker:
        train(options)
        return
    runs = {}
    for name in [options.policy] if options.policy else POLICIES:
        options.policy = name
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = contention.run(options, Path(folder), __file__)
    ends = {
        name: np.cumsum([line.wall_seconds for line in run.steps]) for name, run in runs.items()
    }
    shortest = min(times[-1] for times in ends.values())
    steps = {name: int((times <= shortest).sum()) for name, times in ends.items()}
    print(f"{options.contention}, in the first {shortest:.0f} s:")
    print("| policy | steps | over the first | efficiency |")
    print("|---|---|---|---|")
    for name, made in steps.items():
        gain = made / next(iter(steps.values()))
        print(f"| {name} | {made} | {gain:.2f} | {efficiency(runs[name]):.3f} |")


if __name__ == "__main__":
    sys.exit(main())
