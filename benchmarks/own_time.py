"""Prints what each call of a session costs in a step, in CPU time of its thread and in wall time.

    python benchmarks/own_time.py                 # sessions of 2, 3 and 32 threads, no framework
    python benchmarks/own_time.py tensorflow      # two Keras processes; also: mxnet

Times are those of worker 0 and contain those of the calls below them. A call may wait: for other
threads, for the operating system, for a kernel that a GPU has not finished. Then its wall time is
longer than its CPU time.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

SETTLING = 20  # steps that are not counted: of traces, of batches that still change


class Times:
    """Adds up the seconds of calls, per step, from `start` on."""

    def __init__(self, steps: int, *, all_threads: bool) -> None:
        self.steps, self._thread = steps, None if all_threads else threading.get_ident()
        self.calls: dict[str, list[float]] = {}  # number, CPU seconds, wall seconds
        self._started: float | None = None

    def start(self) -> None:
        """Begins to count."""
        self._started = time.perf_counter()

    @contextmanager
    def of(self, *calls: tuple[Any, str]) -> Iterator[None]:
        """Watches functions, given by the class or module that has them and their names."""
        with ExitStack() as stack:
            for owner, name in calls:
                label = f"{owner.__name__.rpartition('.')[2]}.{name}"
                watched = self._watched(label, getattr(owner, name))
                stack.enter_context(patch.object(owner, name, watched))
            yield

    def _watched(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        found = self.calls.setdefault(label, [0, 0.0, 0.0])

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._started is None or self._thread not in (None, threading.get_ident()):
                return function(*args, **kwargs)
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
                for place, each in enumerate((1, cpu, wall)):
                    found[place] += each

        return watched

    def report(self, title: str) -> None:
        """Prints the table; call it when the last step has ended."""
        seconds = time.perf_counter() - self._started
        print(f"\n{title}: {1e3 * seconds / self.steps:.2f} ms a step")
        print(f"{'call':45} a step  CPU ms  wall ms")
        for label, (number, cpu, wall) in self.calls.items():
            if number:
                a, b, c = number / self.steps, 1e3 * cpu / self.steps, 1e3 * wall / self.steps
                print(f"{label:45} {a:6.2f} {b:7.3f} {c:8.3f}")


def of_session() -> list[tuple[Any, str]]:
    """Returns the calls that sessions of all frameworks have."""
    from lbbsp_core.predict.estimator import SpeedEstimator
    from lbbsp_core.resources import ResourceSampler
    from lbbsp_core.runtime.extensions.base import Extensions
    from lbbsp_core.runtime.loop import session
    from lbbsp_core.runtime.planning.balancer import Balancer

    return [
        (session.WorkerSession, "local_indices"),
        (session.WorkerSession, "before_allreduce"),
        (session.StepMeter, "reach"),
        (ResourceSampler, "sample"),
        (Balancer, "report"),
        (SpeedEstimator, "learn"),
        (SpeedEstimator, "predict"),
        (SpeedEstimator, "train"),
        (Extensions, "offer"),
        (session, "encode"),
        (session.WorkerSession, "after_allreduce"),
        (session, "decode"),
        (Balancer, "receive"),
        (Extensions, "end_step"),
    ]


def without_framework(workers: int, policy: str, steps: int) -> None:
    """Runs a session in each thread; the rows are exchanged through a list."""
    import numpy as np

    from lbbsp_core import SessionOptions, WorkerSession

    rows: list[Any] = [None] * workers
    barrier = threading.Barrier(workers, timeout=600)

    class Threads:
        def __init__(self, rank: int) -> None:
            self.rank, self.workers = rank, workers

        def all_gather(self, values: Any) -> list[Any]:
            rows[self.rank] = values
            barrier.wait()
            found = list(rows)
            barrier.wait()
            return found

    times, total = Times(steps, all_threads=False), 32 * workers

    def train(rank: int) -> None:
        gather = Threads(rank)
        session = WorkerSession(gather, total, SessionOptions(policy=policy), framework="none")
        order = session.make_order(4 * total)
        session.use_order(order)
        session.start({})
        for step in range(SETTLING + steps):
            if step == SETTLING and rank == 0:
                times.start()
            session.begin_step()
            session.local_indices(step)
            session.meter.add_busy(0.01 * (1 + rank / workers) + 0.001 * np.sin(step))
            session.after_allreduce(gather.all_gather(session.before_allreduce()))
        session.close()

    with times.of(*of_session()):
        others = [threading.Thread(target=train, args=(rank,)) for rank in range(1, workers)]
        for each in others:
            each.start()
        train(0)
        for each in others:
            each.join()
    times.report(f"{workers} threads, policy {policy}")


def keras_worker(policy: str, steps: int, channels: int) -> None:
    """Trains a small net with Keras as one of the workers."""
    import keras
    import tensorflow as tf
    from networks import convolutional, data

    import lbbsp_tf
    from lbbsp_tf import fit
    from lbbsp_tf.data import source

    communication = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=communication)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    balancer = lbbsp_tf.LoadBalancer(strategy, 64, policy=policy)
    times = Times(steps, all_threads=True)

    class Settled(keras.callbacks.Callback):
        count = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.count == SETTLING:
                times.start()
            self.count += 1

    calls = [
        (fit.BalancedFit, "on_train_batch_begin"),
        (fit.BalancedFit, "on_train_batch_end"),
        (fit._AfterOthers, "on_train_batch_end"),
        (source.Source, "read"),
        *of_session(),
    ]
    with times.of(*calls):
        model = convolutional(strategy, channels)
        x, y = data()
        model.fit(
            balancer.dataset(x, y, steps_per_epoch=SETTLING + steps),
            steps_per_epoch=SETTLING + steps, callbacks=[Settled(), balancer], verbose=0,
        )  # fmt: skip
    if balancer.rank == 0:
        times.report(f"Keras, policy {policy}")


def gluon_worker(policy: str, steps: int, channels: int) -> None:
    """Trains a small net with gluon as one of the workers."""
    import lbbsp_mx

    import mxnet as mx  # isort: skip
    import numpy as np
    from mxnet import autograd, gluon
    from networks_mx import SIDE, convolutional

    from lbbsp_core.runtime.loop.pipelined import PipelinedSession

    net, rng = convolutional(channels), np.random.default_rng(0)
    loss_of, count = gluon.loss.SoftmaxCrossEntropyLoss(), 64 * (SETTLING + steps)
    images = rng.normal(size=(384, 1, SIDE, SIDE)).astype("f4")
    data = gluon.data.ArrayDataset(images, rng.integers(0, 10, 384).astype("f4"))
    repeated = [data[i % 384] for i in range(count)]
    store = mx.kv.create("dist_sync")
    trainer = lbbsp_mx.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, store,
                               global_batch_size=64, policy=policy)  # fmt: skip
    times = Times(steps, all_threads=True)
    calls = [(lbbsp_mx.Trainer, "step"), (PipelinedSession, "end_step"), *of_session()]
    with times.of(*calls):
        loader = gluon.data.DataLoader(repeated, batch_sampler=trainer.batch_sampler(count))
        for step, (x, y) in enumerate(loader):
            if step == SETTLING:
                times.start()
            with autograd.record():
                loss = loss_of(net(x), y)
            loss.backward()
            trainer.step(len(x))
            loss.wait_to_read()
        mx.nd.waitall()
    if store.rank == 0:
        times.report(f"gluon, policy {policy}")


WORKERS = {"tensorflow": keras_worker, "mxnet": gluon_worker}


def main() -> None:
    """Launches the workers for each policy, or runs as one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("framework", nargs="?", choices=["none", *WORKERS], default="none")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--channels", type=int, default=4, help="width of the net")
    parser.add_argument("--policies", nargs="+", default=["bsp", "lbbsp"], metavar="POLICY")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 3, 32])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        WORKERS[given.framework](given.policies[0], given.steps, given.channels)
        return

    from lbbsp_core.launch import cluster, launch

    def show(rank: int, line: str) -> None:
        print(line, file=sys.stderr if rank else sys.stdout, flush=True)

    # One thread each, which is enough for these nets; on GPUs, if there are any.
    one_thread = cluster.emulation_defaults()
    del one_thread["CUDA_VISIBLE_DEVICES"]
    os.environ.update(one_thread)
    for policy in given.policies:
        if given.framework == "none":
            for workers in given.workers:
                without_framework(workers, policy, given.steps)
            continue
        numbers = [f"--steps={given.steps}", f"--channels={given.channels}"]
        command = [__file__, given.framework, "--worker", "--policies", policy, *numbers]
        if status := launch(command, workers=2, framework=given.framework, timeout=900,
                            devices="all", output=show):  # fmt: skip
            sys.exit(status)


if __name__ == "__main__":
    main()
