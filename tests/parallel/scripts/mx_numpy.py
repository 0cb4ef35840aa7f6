"""Networks in MXNet's numpy mode, each case beside one process with all samples."""

import sys
from pathlib import Path

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as onp
from mx_parts import largest, weights
from mxnet import autograd, gluon, np, npx
from report import result

from lbbsp_core.testing import ChangingPlans

FOLDER = Path(sys.argv[1])
X, SAMPLES = 24, 24 * 4 + 7
PLANS = ((14, 5, 5), (4, 14, 6), (6, 3, 15), (8, 8, 8))
rng = onp.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 4)).astype("f4")
LABELS = rng.integers(0, 3, SAMPLES).astype("f4")
VALUE = onp.linspace(0.1, 3, SAMPLES, dtype="f4")
DATA = gluon.data.ArrayDataset(FEATURES, LABELS, VALUE)
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
SGD = {"learning_rate": 0.5, "momentum": 0.9, "wd": 1e-2}
rank = lbbsp_mx.KVStore("dist_sync").rank


def network(seed, norm=None, known=True, compiled=False):
    mx.random.seed(seed)
    onp.random.seed(seed)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(5, in_units=4 * known, activation="tanh"))
    if norm:
        net.add(norm(in_channels=5))
    net.add(gluon.nn.Dense(3, in_units=5 * known), gluon.nn.Dense(3, in_units=5 * known))
    net.initialize(mx.init.Uniform(0.7))
    net.hybridize(compiled)
    return net


def backward(net, x, y, value=1.0):
    """Adds the last layer for few samples, so that not every batch uses it."""
    few = (y * x[:, 0] > 2.2).reshape(-1, 1)
    with autograd.record():
        hidden = x
        for layer in net[:-2]:
            hidden = layer(hidden)
        out = net[-2](hidden)
        if few.any():
            out = out + net[-1](hidden) * few
        loss = LOSS(out, y) * value
    loss.backward()


def clip(net):
    for param in net.collect_params().values():
        if param.grad_req != "null":
            param.grad()[:] = np.clip(param.grad(), -0.02, 0.02)


def make(net):
    options = {"global_batch_size": X, "policy": ChangingPlans(PLANS)}
    store = lbbsp_mx.KVStore("dist_sync")
    return lbbsp_mx.Trainer(net.collect_params(), "sgd", dict(SGD), kvstore=store, **options)


def load(net, trainer):
    """Loads parameters that no other worker has."""
    if rank == 0:
        path = str(FOLDER / "parameters")
        network(1, gluon.nn.BatchNorm if len(net) > 3 else None).save_parameters(path)
        net.load_parameters(path)


def send(net, trainer):
    load(net, trainer)
    trainer.broadcast_parameters()


def together(norm=None, change=load, weighted=False, clips=False, **options):
    net = network(2 + rank, norm and lbbsp_mx.SyncBatchNorm, **options)
    trainer = make(net)
    sampler = trainer.batch_sampler(SAMPLES, seed=0)
    change(net, trainer)
    for x, y, value in gluon.data.DataLoader(DATA, batch_sampler=sampler):
        given = {"weight": value.sum()} if weighted else {}
        backward(net, x, y, value if weighted else 1.0)
        if clips:
            trainer.allreduce_grads(**given)
            clip(net)
            trainer.update(1, ignore_stale_grad=True)
        else:
            trainer.step(len(x), ignore_stale_grad=True, **given)
    assert trainer.mean_over_workers(np.array([rank, 1.0])).tolist() == [1.0, 1.0]
    return net


def alone(norm=None, weighted=False, clips=False, **_):
    net = network(1, norm)
    trainer = gluon.Trainer(net.collect_params(), "sgd", dict(SGD), kvstore=None)
    order = onp.random.default_rng((0, 0)).permutation(SAMPLES)
    for begin in range(0, SAMPLES, X):
        index = order[begin : begin + X]
        x, y, value = (np.array(each[index]) for each in (FEATURES, LABELS, VALUE))
        backward(net, x, y, value if weighted else 1.0)
        for param in net.collect_params().values():
            if param.grad_req != "null":
                param.grad()[:] /= value.sum() if weighted else len(index)
        if clips:
            clip(net)
        trainer.update(1, ignore_stale_grad=True)
    return net


CASES = {
    "loaded": {},
    "loaded_deferred": {"known": False},
    "sent": {"change": send, "clips": True},
    "weighted": {"weighted": True},
    "normalised": {"norm": gluon.nn.BatchNorm},
    "normalised_compiled": {"norm": gluon.nn.BatchNorm, "compiled": True, "clips": True},
}
npx.set_np()
try:
    for name in sys.argv[2:]:
        ours, reference = (weights(train(**CASES[name])) for train in (together, alone))
        moved = largest(reference, weights(network(1, CASES[name].get("norm"))))
        result(name, {"difference": largest(ours, reference), "moved": moved})
finally:
    npx.reset_np()
