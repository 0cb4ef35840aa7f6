"""Trains with a policy and a synchroniser that lbbsp does not know: ``mx_custom.py MODE DIR``."""

import sys
import time
from pathlib import Path

import lbbsp_mx

import mxnet as mx  # isort: skip
from custom_schemes import PeriodicBarrier, Ranked
from mx_async import MILLISECONDS, SAMPLES, SEED, X, backward, network
from mxnet import gluon
from report import result

from lbbsp_core import Ema

EPOCHS, RATIO, PERIOD = 2, 0.5, 2
SGD = ("sgd", {"learning_rate": 0.1})


def slow_down(rank, samples):
    """Makes the workers take 1, 3 and 1.8 ms a sample and more."""
    time.sleep((MILLISECONDS[0], MILLISECONDS[2], 1.8)[rank] * 1e-3 * samples)


def asynchronous(folder):
    """Trains under the own synchroniser, with batches from the own policy."""
    net = network(0)
    trainer = lbbsp_mx.AsyncTrainer(
        net.collect_params(), *SGD, sync=PeriodicBarrier(PERIOD), global_batch_size=X,
        policy=Ranked(RATIO), predictor=Ema(0.5), record=folder, seed=SEED,
    )  # fmt: skip
    drawn = []
    for samples in trainer.batch_sampler(SAMPLES, epochs=EPOCHS):
        drawn += samples
        backward(net, samples)
        slow_down(trainer.rank, len(samples))
        trainer.step(len(samples), ignore_stale_grad=True)
    trainer.finish()
    result("drawn", drawn)


def in_step(folder):
    """Trains in step, with batches from the own policy."""
    net = network(0)
    trainer = lbbsp_mx.Trainer(
        net.collect_params(), *SGD, global_batch_size=X, policy=Ranked(RATIO), predictor=Ema(0.5),
        record=folder,
    )  # fmt: skip
    numbers = gluon.data.SimpleDataset(list(range(SAMPLES)))
    loader = gluon.data.DataLoader(numbers, batch_sampler=trainer.batch_sampler(SAMPLES, seed=SEED))
    drawn, sizes = [], []
    for _ in range(EPOCHS):
        for batch in loader:
            samples = batch.asnumpy().astype(int).tolist()
            drawn += samples
            sizes.append(len(samples))
            backward(net, samples)
            slow_down(trainer.kvstore.rank, len(samples))
            trainer.step(len(samples), ignore_stale_grad=True)
    mx.nd.waitall()
    result("drawn", drawn)
    result("sizes", sizes)


if __name__ == "__main__":
    {"asynchronous": asynchronous, "in_step": in_step}[sys.argv[1]](Path(sys.argv[2]))
