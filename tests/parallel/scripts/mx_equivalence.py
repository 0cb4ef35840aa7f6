"""Trains every case on uneven, changing batches, then in one process on whole batches."""

import sys

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mx_parts import largest, weights
from mxnet import autograd, gluon, nd
from report import result

from lbbsp_core.testing import ChangingPlans

X = 64
SAMPLES = 10 * X + 21  # a short last batch in every epoch
EPOCHS = 2
PLANS = {2: ((48, 16), (40, 24), (7, 57)), 3: ((40, 16, 8), (30, 31, 3), (2, 20, 42))}
rng = np.random.default_rng(0)
IMAGES = rng.normal(size=(SAMPLES, 3, 8, 8)).astype("f4")
LABELS = rng.integers(0, 3, SAMPLES).astype("f4")
DATA = gluon.data.ArrayDataset(IMAGES, LABELS)
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
SGD = ("sgd", {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3})
ADAM = ("adam", {"learning_rate": 0.002, "epsilon": 1e-5})


class Case:
    """One way to train."""

    def __init__(self, optimizer=SGD, norm=None, hybrid=False, mean=False, add=False, clears=True,
                 devices=1, deferred=False, two_calls=False, loader=None):  # fmt: skip
        self.optimizer, self.norm, self.hybrid, self.mean = optimizer, norm, hybrid, mean
        self.add, self.clears, self.devices, self.deferred = add, clears, devices, deferred
        self.two_calls, self.loader = two_calls, loader or {}

    def network(self, seed, distributed, devices):
        mx.random.seed(seed)
        np.random.seed(seed)
        known = (lambda n: 0) if self.deferred else (lambda n: n)
        nn, net = gluon.nn, gluon.nn.HybridSequential()
        net.add(nn.Conv2D(8, 3, in_channels=known(3)))
        if self.norm:
            norm = lbbsp_mx.SyncBatchNorm if distributed else nn.BatchNorm
            net.add(norm(in_channels=known(8)), nn.Conv2D(8, 3, padding=1, in_channels=known(8)))
        net.add(nn.Activation("tanh"), nn.Flatten(), nn.Dense(16, in_units=known(288)),
                nn.Activation("tanh"), nn.Dense(3, in_units=known(16)))  # fmt: skip
        net.initialize(mx.init.Xavier(), ctx=[mx.cpu(i) for i in range(devices)])
        if self.hybrid:
            net.hybridize()
        if self.add:
            for param in net.collect_params().values():
                param.grad_req = "add" if param.grad_req == "write" else param.grad_req
        return net

    def backward(self, net, x, y, mean):
        """Gradients of a batch, on all devices, in two parts where they accumulate."""
        devices = [mx.cpu(i) for i in range(self.devices if mean is not None else 1)]
        half = len(x) // 2 if self.add else 0
        for part_x, part_y in [(x[:half], y[:half]), (x[half:], y[half:])][not half :]:
            xs = gluon.utils.split_and_load(part_x, devices[: len(part_x)], even_split=False)
            ys = gluon.utils.split_and_load(part_y, devices[: len(part_y)], even_split=False)
            with autograd.record():
                losses = [LOSS(net(a), b) for a, b in zip(xs, ys, strict=True)]
                losses = [loss.mean() for loss in losses] if mean else losses
            autograd.backward(losses)

    def clear(self, net):
        if self.add:
            params = list(net.collect_params().values())
            for param in params if self.clears else params[::2]:
                param.zero_grad()


CASES = {
    "sgd": Case(),
    "adam": Case(ADAM),
    "hybrid_deferred": Case(hybrid=True, deferred=True),
    "mean_loss": Case(mean=True),
    "accumulated": Case(add=True),
    "added_to_sums": Case(("sgd", {"learning_rate": 0.01}), add=True, clears=False),
    "two_devices": Case(devices=2),
    "two_calls": Case(two_calls=True),
    "loader_threads": Case(loader={"num_workers": 2, "thread_pool": True}),
    "loader_processes": Case(loader={"num_workers": 1}),
    "batch_norm": Case(norm=True),
    "batch_norm_hybrid": Case(norm=True, hybrid=True, deferred=True),
}


def together(case, store):
    net = case.network(1 + store.rank, store, case.devices)  # worker 0's weights are to count
    options = {"policy": ChangingPlans(PLANS[store.num_workers]), "mean_loss": case.mean}
    trainer = lbbsp_mx.Trainer(net.collect_params(), *case.optimizer, kvstore=store,
                               global_batch_size=X, **options)  # fmt: skip
    sampler = trainer.batch_sampler(SAMPLES, seed=0)
    loader = gluon.data.DataLoader(DATA, batch_sampler=sampler, **case.loader)
    sizes = set()
    for _ in range(EPOCHS):
        for x, y in loader:
            sizes.add(len(x))
            case.backward(net, x, y, case.mean)
            if case.two_calls:
                trainer.allreduce_grads()
                trainer.update(len(x))
            else:
                trainer.step(len(x))
            case.clear(net)
    return weights(net), len(sizes)


def alone(case):
    """The reference: one process, whole global batches of the documented order."""
    net = case.network(1, None, 1)
    if case.deferred:
        net(nd.array(IMAGES[:2]))
    start = weights(net)
    trainer = gluon.Trainer(net.collect_params(), *case.optimizer, kvstore=None)
    for epoch in range(EPOCHS):
        order = np.random.default_rng((0, epoch)).permutation(SAMPLES)
        for begin in range(0, SAMPLES, X):
            index = order[begin : begin + X]
            case.backward(net, nd.array(IMAGES[index]), nd.array(LABELS[index]), None)
            trainer.step(len(index))
            case.clear(net)
    return start, weights(net)


class Linear(gluon.Block):
    """Half precision, and gradients that it holds exactly: MXNet multiplies none on a CPU."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(1, 16), dtype="float16", init="ones")

    def forward(self, x):
        return (x * self.weight.data()).sum(axis=1)


def half_precision(trainer_of, steps):
    """Trains in half precision with master weights in single; returns the weights."""
    net = Linear()
    net.initialize()
    trainer, mine = trainer_of(
        net.collect_params(), "sgd", {"learning_rate": 3e-4, "momentum": 0.9,
                                      "multi_precision": True})  # fmt: skip
    signs = np.random.default_rng(5).integers(-1, 2, (X, 16)).astype("f2")
    for _ in range(steps):
        x = nd.array(signs[mine(trainer)], dtype="float16")
        with autograd.record():
            loss = net(x)
        loss.backward()
        trainer.step(len(x))
    return weights(net)


def half_precision_together(*args):
    trainer = lbbsp_mx.Trainer(*args, kvstore=store, global_batch_size=X,
                               policy=ChangingPlans(PLANS[store.num_workers]))  # fmt: skip

    def mine(trainer):
        begin = sum(trainer.sizes[: store.rank])
        return slice(begin, begin + trainer.sizes[store.rank])

    return trainer, mine


store = lbbsp_mx.KVStore("dist_sync")
for name in sys.argv[1:] or CASES:
    if name == "half_precision":
        ours = half_precision(half_precision_together, 40)
        alone_too = half_precision(lambda *a: (gluon.Trainer(*a, kvstore=None),
                                               lambda _: slice(X)), 40)  # fmt: skip
        moved = float(np.abs(ours[0] - 1).max())
        result(name, {"difference": largest(ours, alone_too), "moved": moved, "sizes": 3})
        continue
    case = CASES[name]
    ours, sizes = together(case, lbbsp_mx.KVStore("dist_sync"))
    if store.rank == 0:
        start, reference = alone(case)
        result(name, {"difference": largest(ours, reference), "moved": largest(start, reference),
                      "sizes": sizes})  # fmt: skip
