"""Measures what page faults cost a worker on the CPU, and what glibc saves by keeping memory.

Each process trains a network of one width: Keras as a plain graph, Keras under
`MultiWorkerMirroredStrategy` (a cluster of one worker), or gluon. All batches have one size, or the
size changes every fourth step as under a policy. The processes alternate between glibc's defaults
and the variables with which `lbbsp launch` starts workers. Prints the CPU time of a sample (all
threads, user and system), the page faults of a sample, and the largest resident memory.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from statistics import median
from unittest import mock

import numpy as np

KINDS = {"plain": "tensorflow", "distributed": "tensorflow", "gluon": "mxnet"}
MEAN_SIZE, STEPS, WARM_UP, CHANGE_EVERY = 64, 24, 12, 4


def sizes(changing: bool) -> list[int]:
    """Returns the batch size of each step, seeded, the warm-up included."""
    draws = np.random.default_rng(0).integers(-12, 13, WARM_UP + STEPS) if changing else [0] * 99
    return [MEAN_SIZE + int(draws[k - k % CHANGE_EVERY]) for k in range(WARM_UP + STEPS)]


def train(kind: str, channels: int, changing: bool) -> None:
    """Trains as the worker, and prints CPU milliseconds and page faults per sample, and MB."""
    step = gluon_step(channels) if kind == "gluon" else keras_step(kind, channels)
    planned = sizes(changing)
    for size in planned[:WARM_UP]:
        step(size)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for size in planned[WARM_UP:]:
        step(size)
    after = resource.getrusage(resource.RUSAGE_SELF)
    samples = sum(planned[WARM_UP:])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    faults = after.ru_minflt - before.ru_minflt
    print("RESULT", cpu / samples * 1e3, faults / samples, after.ru_maxrss / 1024)


def keras_step(kind: str, channels: int):
    """Returns a function that trains on a batch of the given size."""
    import tensorflow as tf
    from networks import convolutional, data

    strategy = tf.distribute.get_strategy()
    if kind == "distributed":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    model = convolutional(strategy, channels)
    x, y = (tf.constant(values) for values in data())

    @tf.function(reduce_retracing=True)
    def step(images, labels):
        strategy.run(model.train_step, args=((images, labels),))

    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
        for some in (MEAN_SIZE, MEAN_SIZE + 1, MEAN_SIZE):  # traces for batches of any size
            step(x[:some], y[:some])
    return lambda size: step(x[:size], y[:size])


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


def measure(kind: str, channels: int, changing: bool, kept: bool) -> list[float]:
    """Runs a worker in a process of its own; returns the three numbers that it prints."""
    from lbbsp_core.launch import launch

    # A tunable of the user replaces all that the launcher sets. This one has glibc's default, and
    # unlike the others does not stop glibc from adapting its thresholds.
    environment = {} if kept else {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}
    arguments = ["--worker", kind, "--channels", str(channels), *["--changing"] * changing]
    lines: list[str] = []
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "-1", **environment}):
        status = launch([__file__, *arguments], workers=1, timeout=300, framework=KINDS[kind],
                        output=lambda rank, line: lines.append(line))  # fmt: skip
    found = [line.split()[1:] for line in lines if line.startswith("RESULT")]
    if status or not found:
        sys.exit("\n".join(lines[-40:]))
    return [float(number) for number in found[0]]


def main() -> None:
    """Compares all kinds, widths and settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--changing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    if options.worker:
        train(options.worker, options.channels[0], options.changing)
        return
    print("kind, sizes, channels: CPU ms a sample / page faults a sample / largest MB")
    for kind in options.kinds:
        for changing in (False, True):
            for channels in options.channels:
                runs = {False: [], True: []}
                for _ in range(options.repeats):
                    for kept in runs:
                        runs[kept].append(measure(kind, channels, changing, kept))
                stock, kept = (
                    [median(numbers) for numbers in zip(*runs[mode], strict=True)] for mode in runs
                )
                figures = ["{:.2f} / {:.0f} / {:.0f}".format(*row) for row in (stock, kept)]
                print(
                    f"{kind}, {'changing' if changing else 'one size'}, {channels}: "
                    f"glibc's defaults {figures[0]}, kept {figures[1]}, "
                    f"CPU time {kept[0] / stock[0]:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
