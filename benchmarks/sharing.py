"""Compares BSP, LB-BSP and LB-BSP with work sharing in real jobs beside bursty neighbours.

    python benchmarks/sharing.py [--rounds 4] [--seconds 0.1,0.25,0.5] [--steps 120,70,50]
    python benchmarks/sharing.py --channels 80 --steps 50

Three Keras workers train a small network with X = 192, with real claims and all-reduces. Their
devices are emulated, because three workers that compute on a small machine take each other's
cores: the forward pass sleeps for each sample, on a device that the worker shares with a neighbour.
One or two jobs of the neighbour start and stop at random, as those of `lbbsp launch --contention
bursty:SEED` do, but in proportion to the step, so that they are on and off for a few steps. In each
round, one job of each scheme meets the same neighbours; the seed is that of the round. Prints for
each duration of a step on free devices

- the mean time of the steps by scheme, the median of the rounds, without the first fifth of a job;
- the time of LB-BSP over that of each scheme, the median and the range of the rounds;
- how many steps shared work, and in how many parts;

and what a part has cost with its claim, on free devices: how much longer all workers were busy in
steps of which 40 % were shared, by the number of parts.

With --channels, two workers compute convolutions instead, each on a core of its own that it shares
with processes of that schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING

from contention import WARM_UP, X
from emulated_device import PHASE_STEPS, Device

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from lbbsp_core.runtime.record.record import StepLine

SCHEMES: dict[str, bool | str | float] = {"bsp": False, "lbbsp": False, "auto": "auto", "40 %": 0.4}
"""Value of `share_work` of each scheme."""


def network(strategy: tf.distribute.Strategy, device: Device) -> keras.Model:
    """Returns a compiled network whose forward pass runs on a device."""
    import keras
    import tensorflow as tf

    class OnDevice(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(device.compute, [x], x.dtype), x.shape)

    layers = keras.layers
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [layers.Input((64,)), OnDevice(), layers.Dense(32, "relu"), layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def train(options: argparse.Namespace) -> None:
    """Trains as one of the workers."""
    import logging

    import numpy as np
    import tensorflow as tf
    from networks import convolutional, data
    from sklearn.datasets import load_digits

    import lbbsp_core
    import lbbsp_tf

    rank = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    policy = lbbsp_core.Even() if options.worker == "bsp" else None
    balancer = lbbsp_tf.LoadBalancer(strategy, X, policy=policy, share_work=SCHEMES[options.worker])
    if options.channels:
        (x, y), model = data(), convolutional(strategy, options.channels)
    else:
        seconds = float(options.seconds)
        device = Device(seconds * 3 / X, rank, options.seed, PHASE_STEPS * seconds)
        (x, y), model = load_digits(return_X_y=True), network(strategy, device)
    order = np.arange(int(options.steps) * X) % len(x)  # one long epoch
    feed = balancer.dataset(x[order].astype("f4"), y[order])
    model.fit(feed, steps_per_epoch=balancer.steps_per_epoch, callbacks=[balancer], verbose=0)


def run(
    scheme: str, steps: str, options: argparse.Namespace, seed: int | None
) -> tuple[list[StepLine], str]:
    """Runs a job; returns its steps after the warm-up, and what its workers said of sharing."""
    from lbbsp_core import read_run
    from lbbsp_core.launch import launch
    from lbbsp_core.launch.contention import bursty

    said = []

    def take(rank: int, line: str) -> None:
        if options.verbose:
            print(f"[{rank}] {line}")
        if found := re.search(r".* steps shared work, in .*", line):
            said.append(found[0])

    arguments = ["--worker", scheme, "--steps", steps, "--seconds", options.seconds]
    arguments += ["--seed", str(seed)] if seed is not None else []
    arguments += ["--channels", str(options.channels)] if options.channels else []
    with tempfile.TemporaryDirectory() as folder:
        status = launch(
            [__file__, *arguments],
            workers=2 if options.channels else 3,
            contention=[bursty(rank, seed) for rank in (0, 1)] if options.channels else None,
            run_dir=Path(folder),
            timeout=900,
            output=take,
        )
        if status:
            sys.exit(f"the workers failed with status {status}: --verbose shows their output")
        lines = read_run(folder).steps
    return list(lines[len(lines) // WARM_UP :]), " ".join(said)


def compare(steps: str, options: argparse.Namespace) -> None:
    """Runs the jobs in turns, and prints the table."""
    found: dict[str, list[float]] = {scheme: [] for scheme in ("bsp", "lbbsp", "auto")}
    for number in range(options.rounds):
        for scheme, each in found.items():
            lines, said = run(scheme, steps, options, number)
            each.append(mean(line.wall_seconds for line in lines))
            if said:
                print(f"round {number}: {said}", flush=True)
    print("| scheme | step | LB-BSP / scheme | of the rounds |")
    print("|---|---|---|---|")
    for scheme, each in found.items():
        ratios = [a / b for a, b in zip(found["lbbsp"], each, strict=True)]
        cells = f"{median(each):.3f} s", f"{median(ratios):.3f}"
        print(f"| {scheme} | {' | '.join(cells)} | {min(ratios):.3f} to {max(ratios):.3f} |")
    print(flush=True)


def print_cost(options: argparse.Namespace) -> None:
    """Prints what a part costs on free devices."""
    busy, parts = {}, 0.0
    for scheme in ("lbbsp", "40 %"):
        lines, _ = run(scheme, "100", options, None)
        busy[scheme] = mean(sum(filter(None, line.busy_seconds)) for line in lines)
        parts = mean(sum(line.values.get("parts", ())) for line in lines)
    cost = (busy["40 %"] - busy["lbbsp"]) / parts
    print(f"A part with its claim: {1e3 * cost:.1f} ms, the mean of {parts:.1f} parts a step")


def main() -> None:
    """Runs all jobs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", choices=SCHEMES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", default="0.1,0.25,0.5", help="of steps on free devices")
    parser.add_argument("--steps", default="120,70,50", help="of a job, for each of these")
    parser.add_argument("--channels", type=int, default=0, help="of convolutions")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.worker:
        train(options)
        return
    if options.channels:
        compare(options.steps, options)
        return
    given = options.seconds.split(","), options.steps.split(",")
    if len({*map(len, given)}) > 1:
        parser.error("give --steps as many numbers as --seconds")
    for seconds, steps in zip(*given, strict=True):
        print(f"Steps of {seconds} s on free devices", flush=True)
        options.seconds = seconds
        compare(steps, options)
    options.seconds = "0.2"
    print_cost(options)


if __name__ == "__main__":
    main()
