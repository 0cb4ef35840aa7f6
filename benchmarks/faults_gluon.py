"""Trains as one worker of a gluon job into which a fault is injected: ``faults_gluon.py FOLDER``.

In FOLDER the job leaves its checkpoints, the samples that each worker has read, and the weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from faults_injected import EPOCHS, EVERY, Injector, ReadSamples, X, limit_seconds


def train(folder: Path) -> None:
    """Trains; worker 0 saves the weights."""
    import lbbsp_mx

    import mxnet as mx  # isort: skip
    from mxnet import autograd, gluon

    mx.random.seed(0)
    net = gluon.nn.Sequential()
    dense = gluon.nn.Dense(16, in_units=8, use_bias=False, activation="tanh")
    net.add(dense, lbbsp_mx.SyncBatchNorm(in_channels=16), gluon.nn.Dense(1, in_units=16))
    net.initialize(mx.init.Xavier())
    trainer = lbbsp_mx.Trainer(
        net.collect_params(),
        "adam",
        {"learning_rate": 0.01, "lr_scheduler": mx.lr_scheduler.FactorScheduler(4, 0.9)},
        global_batch_size=X,
        limit_seconds=limit_seconds(),
        seed=0,
    )
    rank = trainer.kvstore.rank
    injector = Injector(rank)
    injector.at("start")
    samples = ReadSamples(folder, injector.attempt, rank)
    loader = gluon.data.DataLoader(samples, batch_sampler=trainer.batch_sampler(len(samples)))
    trainer.resume(folder / "checkpoints", every=EVERY)
    loss_of = gluon.loss.L2Loss()
    for _ in range(trainer.epoch, EPOCHS):
        samples.begin_step(trainer.optimizer.num_update)
        for x, y in loader:
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


if __name__ == "__main__":
    train(Path(sys.argv[1]))
