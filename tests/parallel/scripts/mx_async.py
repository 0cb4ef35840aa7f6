"""Trains under one synchroniser, the last worker being slow, and says what it drew and learned.

``mx_async.py SCHEME POLICY FOLDER LEAD [KIND]``: in its first iteration the last worker waits until
the others are LEAD iterations ahead, which wait for each other until then: else who is faster could
draw all samples. Times of batches are virtual.
"""

import os
import signal
import sys
import time
from pathlib import Path

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
import pytest
from custom_schemes import PeriodicBarrier, Ranked
from mx_parts import largest, weights
from mxnet import autograd, gluon, nd
from report import answer_all, result
from virtual_time import VirtualTime

from lbbsp_core import (
    ASP,
    BSP,
    DSSP,
    SSP,
    ElasticBSP,
    Ema,
    Even,
    LoadBalanced,
    Profile,
    ProportionalControl,
)
from lbbsp_core.demo import digits
from lbbsp_core.order import SampleStream

X, EPOCHS, SEED = 48, 2, 3
SECONDS = 0.001, 0.0018, 0.003  # for a sample, by rank
SCHEMES = {
    "bsp": BSP(),
    "ssp": SSP(2),
    "asp": ASP(),
    "dssp": DSSP(1, 4),
    "elastic": ElasticBSP(lookahead=4),
    "periodic": PeriodicBarrier(2),
}
POLICIES = {
    "even": Even(),
    "lbbsp": LoadBalanced(),
    "proportional": ProportionalControl(),
    "ranked": Ranked(0.5),
}
MOMENTUM = ("sgd", {"learning_rate": 0.2, "momentum": 0.9, "wd": 1e-4})
PLAIN = ("sgd", {"learning_rate": 0.3})
TRAINING, HELD_OUT = digits.digits()
IMAGES, LABELS = TRAINING.x.reshape(len(TRAINING.y), -1), TRAINING.y.astype("f4")
SAMPLES = 10 * X + 13
CONTEXTS = [mx.cpu(0), mx.cpu(1)] if "shares" in sys.argv[5:] else [mx.cpu()]
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def network(seed, contexts=None):
    mx.random.seed(seed)
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(32, in_units=64, activation="tanh"),
            gluon.nn.Dense(10, in_units=32), gluon.nn.Dense(10, in_units=32))  # fmt: skip
    net.initialize(mx.init.Xavier(), ctx=contexts or CONTEXTS)
    return net


class Ledger(gluon.nn.Block):
    """A weight for each sample, and a loss that is the sum of those of a batch: their gradient."""

    def __init__(self):
        super().__init__()
        self.counts = self.params.get("counts", shape=SAMPLES, init="zeros")
        self.initialize(ctx=CONTEXTS)

    def forward(self, samples):
        return self.counts.data(samples.context)[samples].sum()


def losses_of(net, samples, context):
    """Yields losses; those of few samples are of the last layer, which not every batch uses."""
    few = samples % 37 == 0
    for head, chosen in (net[1], samples[~few]), (net[2], samples[few]):
        if len(chosen):
            x, y = (nd.array(each[chosen], context) for each in (IMAGES, LABELS))
            yield LOSS(head(net[0](x)), y)


def backward(net, samples, ledger=None):
    losses, contexts = [], net[0].weight.list_ctx()
    parts = np.split(np.asarray(samples), len(contexts))
    with autograd.record():
        for part, context in zip(parts, contexts, strict=True):
            losses += losses_of(net, part, context)
            if ledger:
                losses.append(ledger(nd.array(part, context)))
    autograd.backward(losses)


def accuracy(net):
    logits = net[1](net[0](nd.array(HELD_OUT.x.reshape(len(HELD_OUT.y), -1)))).asnumpy()
    return float((logits.argmax(axis=1) == HELD_OUT.y).mean())


def alone(x):
    """The weights after batches of x samples, in one process."""
    net = network(0, [mx.cpu()])
    trainer = gluon.Trainer(net.collect_params(), *MOMENTUM, kvstore=None)
    stream = SampleStream(SAMPLES, SEED)
    for begin in range(0, EPOCHS * SAMPLES, x):
        chosen = stream.take(begin, min(begin + x, EPOCHS * SAMPLES))
        backward(net, chosen)
        trainer.step(len(chosen), ignore_stale_grad=True)
    return weights(net)


def wait_until_begun(folder, iteration, ranks):
    """Waits until these workers have begun an iteration."""
    while not all((folder / f"begun-{rank}-{iteration}").exists() for rank in ranks):
        time.sleep(0.001)


def main(scheme, policy, folder, lead, kind=""):
    folder.mkdir(exist_ok=True)
    net, started, ledger = network(0), weights(network(0)), Ledger()
    sync, optimizer = SCHEMES[scheme], MOMENTUM if scheme == "bsp" else PLAIN
    if kind == "disagrees":
        sync = SSP(os.getpid())
    params = [*net.collect_params().values(), *ledger.params.values()]
    with pytest.raises(ValueError, match="cost must be a straight line"):
        lbbsp_mx.AsyncTrainer(params, *optimizer, sync=sync, global_batch_size=X,
                              cost=Profile([1, 8, X], [0.1, 0.2, 0.9]))  # fmt: skip
    trainer = lbbsp_mx.AsyncTrainer(
        params, *optimizer, sync=sync, global_batch_size=X, policy=POLICIES[policy],
        predictor=Ema(0.5), record=folder, seed=os.getpid() if kind == "seeds" else SEED,
        share_work=0.5 if kind.startswith("shares") else False,
    )  # fmt: skip
    store = lbbsp_mx.KVStore("dist_async")
    beside = {
        "second": lambda: lbbsp_mx.AsyncTrainer(
            net.collect_params(), "sgd", sync=sync, global_batch_size=X
        ),
        "keys": lambda: store.init("w", nd.ones(1)),
        "optimizer": lambda: store.set_optimizer(mx.optimizer.SGD()),
        "compression": lambda: store.set_gradient_compression({"type": "2bit"}),
    }
    answer_all(beside, beside)
    computed = VirtualTime(trainer._session._meter)
    drawn, ends = [], 0
    for samples in trainer.batch_sampler(SAMPLES, epochs=EPOCHS):
        drawn += samples
        backward(net, samples, ledger)
        (folder / f"begun-{trainer.rank}-{ends}").touch()
        if ends <= lead:
            wait_until_begun(folder, ends, (0, 1) if ends else (0, 1, 2))
        if trainer.rank == 2 and ends == 0:
            wait_until_begun(folder, lead, (0, 1))
        computed.compute(SECONDS[trainer.rank] * len(samples))
        if kind == "dies" and trainer.rank == 1 and ends == 2:  # far from the end of the samples
            raise RuntimeError("a worker fails")
        if kind == "shares_and_dies" and trainer._session._parts:
            os.kill(os.getpid(), signal.SIGKILL)
        ends += trainer.step(len(samples), ignore_stale_grad=True)
    trainer.finish()
    result("ends", ends)
    result("drawn", drawn)
    result("accuracy", accuracy(net))
    result("weights", [float(np.abs(w).sum()) for w in weights(net)])
    if optimizer is PLAIN:
        rate = PLAIN[1]["learning_rate"]
        result("counts", (-X / rate * ledger.counts.data()).asnumpy().tolist())
    if trainer.rank == 0:
        result("moved", largest(weights(net), started))
        if scheme == "bsp":
            result("difference", largest(weights(net), alone(X)))


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
