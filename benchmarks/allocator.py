"""Measures what page faults cost a worker on the CPU, and what glibc saves by keeping memory.

Workers train networks of several widths: Keras as a plain graph (`model.fit` in one process), Keras
under `MultiWorkerMirroredStrategy` in several processes, plain and balanced, and gluon in one
process. Keras computes without oneDNN, as on processors without AVX512-VNNI or its successors, and
with it, when TensorFlow has an allocator of its own. The batches of a plain Keras worker have one
size; those of gluon have one size, or the size changes every fourth step as under a policy. The
jobs alternate between glibc's defaults and the variables with which `lbbsp launch` starts workers.
Prints a table of the CPU time of a sample (all threads of all workers, user and system), the page
faults of a sample, and the largest resident memory of a worker.

CPU time depends less than elapsed time on what else the machine does, but it is not independent of
it: run it on an idle machine, with one core per worker.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections import defaultdict
from statistics import median
from typing import NamedTuple
from unittest import mock

import numpy as np

MEAN_SIZE, WARM_UP, CHANGE_EVERY = 64, 12, 4

# A tunable of the user replaces all that the launcher sets. This one has glibc's default, and
# unlike the others does not stop glibc from adapting its thresholds.
DEFAULTS = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}
# As for workers of emulated speeds: threads that wait for work would count as CPU time.
ONE_THREAD = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}


class Kind(NamedTuple):
    """A way to train.

    Args:
        title: What the tables call it.
        framework: Framework of the job.
        distributed: Whether it has several workers.
        changing: Whether the batch size changes.
        balanced: Whether lbbsp plans the batch sizes.
        onednn: Whether TensorFlow uses oneDNN, which it chooses by the processor.
    """

    title: str
    framework: str
    distributed: bool = False
    changing: bool = False
    balanced: bool = False
    onednn: bool = False


KINDS = {
    "plain": Kind("Keras, plain graph", "tensorflow"),
    "mwms": Kind("Keras, MWMS", "tensorflow", distributed=True),
    "lbbsp": Kind("Keras, MWMS, lbbsp", "tensorflow", distributed=True, balanced=True),
    "plain-onednn": Kind("Keras, plain graph, oneDNN", "tensorflow", onednn=True),
    "mwms-onednn": Kind("Keras, MWMS, oneDNN", "tensorflow", distributed=True, onednn=True),
    "gluon": Kind("gluon", "mxnet"),
    "gluon-changing": Kind("gluon, changing sizes", "mxnet", changing=True),
}


def sizes(changing: bool, steps: int) -> list[int]:
    """Returns the batch size of each step, seeded, the warm-up included."""
    steps += WARM_UP
    draws = np.random.default_rng(0).integers(-12, 13, steps) if changing else [0] * steps
    return [MEAN_SIZE + int(draws[k - k % CHANGE_EVERY]) for k in range(steps)]


class Meter:
    """Measures what this process uses between two calls, for a number of samples."""

    def start(self) -> None:
        """Starts at the end of the warm-up."""
        self._before = resource.getrusage(resource.RUSAGE_SELF)

    def stop(self, samples: int) -> None:
        """Prints CPU milliseconds and page faults, both per sample, and MB."""
        before, after = self._before, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        faults = after.ru_minflt - before.ru_minflt
        print("RESULT", cpu / samples * 1e3, faults / samples, after.ru_maxrss / 1024)


def fit_keras(kind: Kind, channels: int, steps: int) -> None:
    """Trains with `model.fit` as one of the workers, in steps of the same size in total."""
    import keras
    import tensorflow as tf
    from networks import SAMPLES, convolutional, data

    from lbbsp_tf import LoadBalancer
    from lbbsp_tf.compat import patch_keras

    strategy, workers = tf.distribute.get_strategy(), 1
    if kind.distributed:
        patch_keras()  # Keras 3 cannot fit under this strategy without it
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        workers = strategy.num_replicas_in_sync
    model = convolutional(strategy, channels)
    model.jit_compile = False  # as under MWMS with lbbsp, in either case
    epoch_steps = SAMPLES // MEAN_SIZE
    x, y = (np.tile(each, (workers, *[1] * (each.ndim - 1))) for each in data())
    meter = Meter()

    class Measured(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == WARM_UP // epoch_steps:
                meter.start()

        def on_train_end(self, logs=None):
            meter.stop(steps * MEAN_SIZE)

    options = {"callbacks": [Measured()], "epochs": (WARM_UP + steps) // epoch_steps, "verbose": 0}
    total = MEAN_SIZE * workers
    if kind.balanced:
        balancer = LoadBalancer(strategy, global_batch_size=total)
        options["callbacks"].append(balancer)
        model.fit(balancer.dataset(x, y, seed=0), steps_per_epoch=epoch_steps, **options)
    else:
        model.fit(x, y, batch_size=total, **options)


def train_gluon(changing: bool, channels: int, steps: int) -> None:
    """Trains in a process of its own, in steps of the planned sizes."""
    step, planned, meter = gluon_step(channels), sizes(changing, steps), Meter()
    for size in planned[:WARM_UP]:
        step(size)
    meter.start()
    for size in planned[WARM_UP:]:
        step(size)
    meter.stop(sum(planned[WARM_UP:]))


def gluon_step(channels: int):
    """Returns a function that trains on a batch of the given size, and waits for the end."""
    import lbbsp_mx  # noqa: F401

    import mxnet as mx  # isort: skip
    from mxnet import autograd, gluon
    from networks_mx import SIDE, convolutional

    net = convolutional(channels)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=None)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

    def step(size):
        images, labels = mx.nd.ones((size, 1, SIDE, SIDE)), mx.nd.zeros((size,))
        with autograd.record():
            loss = loss_of(net(images), labels)
        loss.backward()
        trainer.step(size)
        mx.nd.waitall()

    return step


def measure(name: str, channels: int, kept: bool, options: argparse.Namespace) -> list[float]:
    """Runs a job; returns the three numbers that its workers print.

    They are means over the workers, which have as many samples, and the largest memory.
    """
    from lbbsp_core.launch import launch

    kind, arguments = KINDS[name], ["--channels", str(channels), "--steps", str(options.steps)]
    environment = {**ONE_THREAD, "CUDA_VISIBLE_DEVICES": "-1", **({} if kept else DEFAULTS)}
    environment["TF_ENABLE_ONEDNN_OPTS"] = str(int(kind.onednn))
    lines: dict[int, list[str]] = defaultdict(list)
    with mock.patch.dict(os.environ, environment):
        status = launch([__file__, "--worker", name, *arguments],
                        workers=options.workers if kind.distributed else 1, timeout=900,
                        framework=kind.framework,
                        output=lambda rank, line: lines[rank].append(line))  # fmt: skip
    printed = [
        [float(number) for number in line.split()[1:]]
        for own in lines.values()
        for line in own
        if line.startswith("RESULT")
    ]
    if status or not printed:
        sys.exit("\n".join(line for own in lines.values() for line in own[-40:]))
    cpu, faults, memory = zip(*printed, strict=True)
    return [sum(cpu) / len(cpu), sum(faults) / len(faults), max(memory)]


def main() -> None:
    """Compares all kinds, widths and settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 48, 96])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--workers", type=int, default=2, help="workers of MWMS")
    parser.add_argument("--steps", type=int, default=24, help="measured steps, in sixes")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    if options.worker:
        kind = KINDS[options.worker]
        if kind.framework == "mxnet":
            train_gluon(kind.changing, *options.channels, options.steps)
        else:
            fit_keras(kind, *options.channels, options.steps)
        return
    print("| | channels | CPU ms a sample | with the variables | page faults a sample "
          "| resident memory, MB |\n|---|---|---|---|---|---|", flush=True)  # fmt: skip
    for name in options.kinds:
        for channels in options.channels:
            runs: dict[bool, list[list[float]]] = {False: [], True: []}
            for _ in range(options.repeats):
                for kept, own in runs.items():
                    own.append(measure(name, channels, kept, options))
            stock, kept = ([median(each) for each in zip(*own, strict=True)]
                           for own in runs.values())  # fmt: skip
            print(
                f"| {KINDS[name].title} | {channels} | {stock[0]:.2f} | {kept[0]:.2f} "
                f"| {stock[1]:.0f}, then {kept[1]:.0f} | {stock[2]:.0f}, then {kept[2]:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
