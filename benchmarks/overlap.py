"""Measures how much of the communication hides behind the backward pass, on links of a given rate.

    python benchmarks/overlap.py [--workers 2,3] [--rates 200,500] [--rounds 5] [--steps 12]
    python benchmarks/overlap.py --balance [--rates 200,0]

Network namespaces stand for hosts, so that communication takes time, but hardly any processor; a
rate is in Mbit/s, for each direction of each link, and 0 runs all workers on this machine. They
need root and the program `tc`; without them the reason is printed.

Keras workers of one thread train convolutions under dense layers of about 10 MB: their gradients
are computed first. Then the backward pass rests, as on the host of an accelerator, because threads
that communicate would wait for the processors of a small machine (--rest 0 --channels 96 computes
instead). In interleaved rounds, on even batches:

- lbbsp, with buckets of the size that it measures;
- lbbsp with all gradients in one pack;
- stock Keras 3 (with the same patches), which sends one pack;
- stock Keras 3 with ``CommunicationOptions(bytes_per_pack=1 << 20)``.

Prints the median step of each variant, with the first and last quartile of rounds. *alone* is the
median busy time of the slowest worker under one pack, *not hidden* a step less that.

With --balance, worker 0 needs half the time per sample of all others, and sleeps in the backward
pass. Prints the mean plans of the last half of all steps: a slow link must not change them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from namespaces import namespaces

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

RESULT = "RESULT "
PACKS = {"lbbsp": 0, "one pack": 1 << 40, "stock": 0, "stock, 1 MB": 1 << 20}
"""Value of `bytes_per_pack` of each variant."""
WIDTH, DENSE = 900, 4
"""Units and number of the large dense layers."""
BALANCE_X, SAMPLE_SECONDS = 384, 0.0015
signalled: list[int] = []  # by number

# As ssh, for hosts that are namespaces: ssh OPTIONS HOST COMMAND
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case $1 in -o) shift 2 ;; *) shift ;; esac; done
host=$1
shift
exec env --default-signal=HUP,INT,TERM LBBSP_HOST="$host" ip netns exec "$host" sh -c "$*"
"""


# --- workers --------------------------------------------------------------------------------------


def network(
    strategy: tf.distribute.Strategy, channels: int, sample_seconds: float = 0.0
) -> keras.Model:
    """Returns a compiled network with its weights at the top.

    `sample_seconds` are those that its backward pass sleeps for each sample, below them.
    """
    import keras
    import tensorflow as tf
    from networks import SIDE

    class Resting(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            @tf.custom_gradient
            def resting(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
                def rest(upstream: Any) -> Any:
                    time.sleep(sample_seconds * len(upstream))
                    return upstream

                return tf.identity(x), lambda upstream: tf.ensure_shape(
                    tf.numpy_function(rest, [upstream], upstream.dtype, stateful=False),
                    upstream.shape,
                )

            return resting(x)

    layers = keras.layers
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                layers.Input((SIDE, SIDE, 1)),
                *(layers.Conv2D(channels, 3, activation="relu") for _ in range(3)),
                layers.GlobalAveragePooling2D(),
                *([Resting()] if sample_seconds else []),
                *(layers.Dense(WIDTH, activation="relu") for _ in range(DENSE)),
                layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def compare(options: argparse.Namespace) -> None:
    """Trains all variants as one of the workers; the first one prints the figures."""
    import keras
    import numpy as np
    import tensorflow as tf
    from keras_blocks import Side, step_seconds
    from networks import SAMPLES, data

    import lbbsp_core
    import lbbsp_tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    workers, X = strategy.num_replicas_in_sync, options.samples * strategy.num_replicas_in_sync
    folder = Path(os.environ["LBBSP_RUN_DIR"])

    class Packs(keras.callbacks.Callback):
        """Sets `bytes_per_pack` before a fit is prepared, and its step traced."""

        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

        def on_train_begin(self, logs: Any = None) -> None:
            strategy.extended._communication_options.bytes_per_pack = self.size

    x, y = data()
    order = lbbsp_core.GlobalOrder(SAMPLES, X)
    constants, sides, records = (tf.constant(x), tf.constant(y)), {}, []
    rank, rest = strategy.cluster_resolver.task_id, options.rest / options.samples

    def slices() -> Iterator[Any]:
        for step in range(10**9):
            yield order.slice(step, rank, (options.samples,) * workers)

    def stock_data(context: Any) -> tf.data.Dataset:
        spec = tf.TensorSpec([None], tf.int64)
        indices = tf.data.Dataset.from_generator(slices, output_signature=spec)
        batches = indices.map(lambda i: tuple(tf.gather(c, i) for c in constants))
        endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        return batches.apply(endless).prefetch(1)

    for name, size in PACKS.items():
        model, callbacks = network(strategy, options.channels, rest), (Packs(size),)
        if name.startswith("stock"):
            feed = strategy.distribute_datasets_from_function(stock_data)
        else:
            records.append(folder / name)
            balancer = lbbsp_tf.LoadBalancer(strategy, X, policy="bsp", record=records[-1])
            feed = balancer.dataset(x, y, steps_per_epoch=options.steps)
            callbacks = (*callbacks, balancer)
        sides[name] = Side(model, feed, callbacks)
    steps = options.steps
    times = step_seconds(sides, options.rounds, steps=steps, steps_per_epoch=steps)
    if rank == 0:
        # As of the times, without the first round.
        lines = (lbbsp_core.read_run(record).steps[steps:] for record in records)
        ours, one_pack = ([line for line in each if line.is_regular] for each in lines)
        figures = {
            "seconds": times,
            "alone": float(np.median([max(line.busy_seconds) for line in one_pack])),
            "hidden": float(np.median([line.hidden_seconds for line in ours])),
        }
        print(RESULT + json.dumps(figures))


def balance(options: argparse.Namespace) -> None:
    """Trains as one of several unequal workers; the first one prints the mean plan."""
    import numpy as np
    import tensorflow as tf
    from networks import data

    import lbbsp_core
    import lbbsp_tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank, record = strategy.cluster_resolver.task_id, Path(os.environ["LBBSP_RUN_DIR"])
    balancer = lbbsp_tf.LoadBalancer(strategy, BALANCE_X, record=record)
    feed = balancer.dataset(*data(), steps_per_epoch=options.steps)  # one long epoch
    model = network(strategy, 4, SAMPLE_SECONDS * (2 if rank else 1))
    model.fit(feed, steps_per_epoch=options.steps, callbacks=[balancer], verbose=0)
    if rank == 0:
        lines = lbbsp_core.read_run(record).last_half()
        print(RESULT + json.dumps(np.mean([line.sizes for line in lines], axis=0).tolist()))


# --- jobs -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def hosts(workers: int, mbits: float) -> Iterator[list[str] | None]:
    """Yields the names of the workers' hosts, which `launch` reaches; None for this machine."""
    if not mbits:
        yield None
        return
    addresses = [f"10.231.79.{rank + 1}" for rank in range(workers)]
    path = os.environ["PATH"]
    with namespaces(*addresses, mbits=mbits) as names, tempfile.TemporaryDirectory() as folder:
        ssh = Path(folder, "ssh")
        ssh.write_text(SSH)
        ssh.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{path}"
        try:
            yield names
        finally:
            os.environ["PATH"] = path


def leave(number: int, _: object) -> None:
    """Handles a signal: leaves by way of what removes namespaces."""
    signalled.append(number)
    sys.exit(128 + number)


def run(workers: int, mbits: float, options: argparse.Namespace) -> Any:
    """Launches the workers on links of a rate, and returns what the first one has measured."""
    from lbbsp_core.launch import cluster, launch

    os.environ.update(cluster.emulation_defaults())  # one thread each
    names = ("rounds", "steps", "samples", "channels", "rest")
    given = [f"--{name}={getattr(options, name)}" for name in names]
    lines: list[str] = []

    def take(rank: int, line: str) -> None:
        lines.append(line)
        if options.verbose:
            print(f"[{rank}] {line}", flush=True)

    with hosts(workers, mbits) as found, tempfile.TemporaryDirectory() as folder:
        if signalled:  # where Python ignores what a handler raises, as in a finaliser
            sys.exit(128 + signalled[0])
        status = launch(
            [__file__, "--worker", *given, *(["--balance"] if options.balance else [])],
            workers=workers, hosts=found, run_dir=Path(folder), timeout=options.timeout,
            output=take,
        )  # fmt: skip
    if status:
        print("\n".join(lines[-40:]), file=sys.stderr)
        sys.exit(status)
    (figures,) = (line.removeprefix(RESULT) for line in lines if line.startswith(RESULT))
    return json.loads(figures)


def row(workers: int, mbits: float, figures: dict[str, Any]) -> str:
    """Returns a line of the table."""
    import numpy as np

    steps = {name: np.quantile(s, (0.5, 0.25, 0.75)) for name, s in figures["seconds"].items()}
    ours, before = (steps[name][0] - figures["alone"] for name in ("lbbsp", "one pack"))
    cells = [
        str(workers), f"{mbits:g}" if mbits else "none", f"{figures['alone'] * 1e3:.0f}",
        *("{:.0f} ({:.0f} to {:.0f})".format(*each * 1e3) for each in steps.values()),
        f"{figures['hidden'] * 1e3:.0f}", f"{ours * 1e3:.0f}", f"{before * 1e3:.0f}",
        f"{ours / before:.2f}", f"{steps['lbbsp'][0] / steps['one pack'][0]:.3f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def listed(kind: Callable[[str], float], least: float) -> Callable[[str], list[float]]:
    """Returns a parser of numbers with commas between them."""

    def numbers(text: str) -> list[float]:
        values = [kind(number) for number in text.split(",")]
        if not all(least <= value < math.inf for value in values):
            raise argparse.ArgumentTypeError(f"must be at least {least}, and finite, got {text}")
        return values

    return numbers


def main() -> None:
    """Runs the jobs and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=listed(int, 2), default=[2, 3])
    rates = "default: 200,500; with --balance 200,0"
    parser.add_argument("--rates", type=listed(float, 0), help=rates)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="in a block, default 12; with --balance 80")
    parser.add_argument("--samples", type=int, default=64, help="of each worker, in a step")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--rest", type=float, default=0.3, help="seconds of the backward pass")
    parser.add_argument("--balance", action="store_true", help="compare the plans of two links")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of a job")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps is None:
        options.steps = 80 if options.balance else 12
    for name, least in {"rounds": 1, "steps": 2, "samples": 1, "channels": 1}.items():
        if (value := getattr(options, name)) < least:
            parser.error(f"argument --{name}: must be at least {least}, got {value}")
    if options.worker:
        (balance if options.balance else compare)(options)
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    try:
        (print_plans if options.balance else print_table)(options)
    except unittest.SkipTest as reason:
        print(f"nothing measured: {reason}")


def print_table(options: argparse.Namespace) -> None:
    """Prints a row for each number of workers on each rate."""
    variants = [f"{name}, ms" for name in PACKS]
    columns = ["workers", "Mbit/s", "alone, ms", *variants, "hidden, ms", "not hidden, ms",
               "one pack, ms", "not hidden / one pack", "step / one pack"]  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for workers in options.workers:
        for rate in options.rates or [200, 500]:
            print(row(workers, rate, run(workers, rate, options)), flush=True)


def print_plans(options: argparse.Namespace) -> None:
    """Prints the plans on each rate, and how far they are from those on the last one."""
    import numpy as np

    rates = options.rates or [200, 0]
    for workers in options.workers:
        plans = np.array([run(workers, rate, options) for rate in rates])
        far = np.max(np.abs(plans / plans[-1] - 1), axis=1)
        for rate, plan, distance in zip(rates, plans, far, strict=True):
            sizes = ", ".join(f"{size:.1f}" for size in plan)
            print(f"{workers} workers, {rate or 'no'} Mbit/s: {sizes} ({distance:.1%})", flush=True)


if __name__ == "__main__":
    main()
