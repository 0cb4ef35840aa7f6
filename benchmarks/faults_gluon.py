"""Trains as one worker of a gluon job into which a fault is injected: ``faults_gluon.py FOLDER``.

In FOLDER the job leaves its checkpoints, the samples that each worker has read, and the weights.
A second argument is its variant: "plain", "noise" (dropout, seeded in each step, and plans that
depend on the step only) or "buckets" (a fault may be between two gradients of a step).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from faults_injected import EPOCHS, EVERY, Injector, ReadSamples, X, limit_seconds


def train(folder: Path, variant: str = "plain") -> None:
    """Trains; worker 0 saves the weights."""
    import lbbsp_mx

    import mxnet as mx  # isort: skip
    from mxnet import autograd, gluon

    from lbbsp_core.testing import ChangingPlans

    mx.random.seed(0)
    net = gluon.nn.Sequential()
    dense = gluon.nn.Dense(16, in_units=8, use_bias=False, activation="tanh")
    net.add(dense, lbbsp_mx.SyncBatchNorm(in_channels=16))
    if variant == "noise":
        net.add(gluon.nn.Dropout(0.3))
    net.add(gluon.nn.Dense(1, in_units=16))
    net.initialize(mx.init.Xavier())
    trainer = lbbsp_mx.Trainer(
        net.collect_params(),
        "adam",
        {"learning_rate": 0.01, "lr_scheduler": mx.lr_scheduler.FactorScheduler(4, 0.9)},
        global_batch_size=X,
        limit_seconds=limit_seconds(),
        seed=0,
        policy=ChangingPlans() if variant == "noise" else None,
    )
    rank = trainer.kvstore.rank
    injector = Injector(folder, rank)
    if variant == "buckets":
        _call_between(trainer._store, lambda: injector.at("bucket", trainer.optimizer.num_update))
    injector.at("start")
    samples = ReadSamples(folder, injector.attempt, rank)
    loader = gluon.data.DataLoader(samples, batch_sampler=trainer.batch_sampler(len(samples)))
    trainer.resume(folder / "checkpoints", every=EVERY)
    loss_of = gluon.loss.L2Loss()
    for _ in range(trainer.epoch, EPOCHS):
        samples.begin_step(trainer.optimizer.num_update)
        for x, y in loader:
            if variant == "noise":  # a restart does not continue MXNet's random states
                mx.random.seed(trainer.optimizer.num_update * trainer.kvstore.num_workers + rank)
            with autograd.record():
                loss = loss_of(net(x), y)
            loss.backward()
            trainer.step(len(x))
            injector.at("step", trainer.optimizer.num_update - 1)
            samples.begin_step(trainer.optimizer.num_update)
    injector.at("end")
    if rank == 0:
        weights = [each.data().asnumpy() for each in net.collect_params().values()]
        np.savez(folder / "weights.npz", *weights)


def _call_between(store: Any, function: Callable[[], None]) -> None:
    """Calls a function between the sums of two gradients, once the first one is complete."""
    queue = store.pushpull

    def pushpull(key: object, arrays: list[Any], priority: int = 0) -> None:
        queue(key, arrays, priority=priority)
        if priority == -1:
            arrays[0].wait_to_read()
            function()

    store.pushpull = pushpull


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:])
