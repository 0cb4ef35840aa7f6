"""Models that one worker changes otherwise than its peers: named on all, or made equal again."""

import os
import tempfile
from functools import lru_cache, partial
from pathlib import Path

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mx_parts import largest, weights
from mxnet import autograd, gluon, nd
from report import answer_all, result

from lbbsp_core.testing import ChangingPlans

X, SAMPLES = 24, 96
PLANS = ((12, 8, 4), (7, 7, 10), (2, 20, 2))
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 4)).astype("f4")
LABELS = rng.integers(0, 2, SAMPLES).astype("f4")
DATA = gluon.data.ArrayDataset(FEATURES, LABELS)
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
store = lbbsp_mx.KVStore("dist_sync")
rank = store.rank


def network(seed, known=True, devices=1):
    mx.random.seed(seed)
    np.random.seed(seed)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, activation="tanh", in_units=4 * known),
            gluon.nn.Dense(2, in_units=8 * known))  # fmt: skip
    net.initialize(mx.init.Xavier(), ctx=[mx.cpu(i) for i in range(devices)])
    return net


class FromOne(mx.lr_scheduler.LRScheduler):
    """A schedule that is not defined for update 0, which MXNet never makes."""

    def __call__(self, update):
        return self.base_lr * update**-0.5


def sgd(schedule=None):
    return mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, wd=1e-3, lr_scheduler=schedule)


def make(net, optimizer=None, **options):
    options = {"global_batch_size": X, "policy": ChangingPlans(PLANS), **options}
    own_store = lbbsp_mx.KVStore("dist_sync")
    params = net.collect_params()
    return lbbsp_mx.Trainer(params, optimizer or sgd(), kvstore=own_store, **options)


def backward(net, x, y, devices=1):
    contexts = [mx.cpu(i) for i in range(devices)]
    parts = [gluon.utils.split_and_load(a, contexts[: len(x)], even_split=False) for a in (x, y)]
    with autograd.record():
        losses = [LOSS(net(a), b) for a, b in zip(*parts, strict=True)]
    autograd.backward(losses)


def train(net, it, epochs=2, each_step=lambda step: None, each_epoch=lambda epoch: None,
          two_calls=False, devices=1, **loading):  # fmt: skip
    """Trains; ``each_step(step)`` changes something between the forward pass and the update."""
    sampler = it.batch_sampler(SAMPLES, seed=0)
    loader = gluon.data.DataLoader(DATA, batch_sampler=sampler, **loading)
    step = 0
    for epoch in range(epochs):
        each_epoch(epoch)
        for x, y in loader:
            backward(net, x, y, devices)
            each_step(step)
            if two_calls:
                it.allreduce_grads()
                it.update(len(x))
            else:
                it.step(len(x))
            step += 1


def alone(net, optimizer=None, epochs=2, each_step=lambda step: None,
          each_epoch=lambda epoch: None):  # fmt: skip
    """The reference: one process, whole batches of the same order."""
    params = list(net.collect_params().values())  # in the order of their creation, as here
    it = gluon.Trainer(params, optimizer or sgd(), kvstore=None)
    step = 0
    for epoch in range(epochs):
        each_epoch(epoch)
        order = np.random.default_rng((0, epoch)).permutation(SAMPLES)
        for begin in range(0, SAMPLES, X):
            index = order[begin : begin + X]
            backward(net, nd.array(FEATURES[index]), nd.array(LABELS[index]))
            each_step(step)
            it.step(len(index))
            step += 1
    return weights(net)


# --- disagreements --------------------------------------------------------------------------------


def at(step, only, change, **options):
    """Trains; worker `only` alone makes a change in `step`."""
    net = network(1)
    it = make(net, **options)
    train(net, it, each_step=lambda now: now == step and rank == only and change(it, net))


def shift(it, net):
    net[0].weight.set_data(net[0].weight.data() + 1)


class Centred(gluon.nn.HybridBlock):
    """Subtracts a moving average of samples, a parameter that is not learned."""

    def __init__(self):
        super().__init__()
        self.centre = self.params.get("centre", shape=(4,), init="zeros", grad_req="null")

    def forward(self, x):
        self.centre.set_data(0.9 * self.centre.data() + 0.1 * x.mean(axis=0))
        return x - self.centre.data()


class Masked(gluon.nn.HybridBlock):
    """Has a constant with the numbers of masks of transformers."""

    def __init__(self):
        super().__init__()
        self.mask = self.params.get_constant("mask", [[-1e9, float("-inf"), 0, 0]])

    def forward(self, x):
        return nd.where(self.mask.data().broadcast_like(x) < 0, x, 2 * x)


def behind(layer, change=lambda it, net: None):
    """Trains a network behind another layer, and perhaps changes it on one worker."""
    net, learned = gluon.nn.Sequential(), network(1)
    net.add(layer, learned)
    net.initialize()
    train(net, make(net), each_step=lambda now: now == 5 and rank == 2 and change(None, learned))


def request(kind, *params):
    for param in params:
        param.grad_req = kind


def frozen_at(step, *ranks, layers=(0,), **options):
    """Trains; some workers freeze layers in `step`."""
    net = network(1)
    params = [param for layer in layers for param in net[layer].params.values()]
    change = lambda now: now == step and rank in ranks and request("null", *params)  # noqa: E731
    train(net, make(net), each_step=change, **options)
    return net


def thawed(*ranks):
    """Trains a layer in the second epoch alone, on some workers."""
    net = network(1)
    net[0].collect_params().setattr("grad_req", "null")
    thaw = lambda epoch: epoch and net[0].collect_params().setattr("grad_req", "write")  # noqa: E731
    if ranks:
        train(net, make(net), each_epoch=thaw if rank in ranks else bool)
        return net
    alone(net, each_epoch=thaw)
    return net


def without_sampler(change):
    net = network(1)
    it = make(net)
    if rank == 1:
        change(net)
    begin = sum(it.sizes[:rank])
    own = slice(begin, begin + it.sizes[rank])
    backward(net, nd.array(FEATURES[own]), nd.array(LABELS[own]))
    it.step(it.sizes[rank])
    nd.waitall()
    return weights(net)


def in_another_order():
    net = network(1)
    it = make(net)
    sampler = it.batch_sampler(SAMPLES)
    if rank == 0:
        next(iter(sampler))
    backward(net, nd.array(FEATURES[:2]), nd.array(LABELS[:2]))
    it.step(it.sizes[rank])


def part(changed_on=None):
    """Trains the second layer alone, with a trainer that does not have the first one."""
    net = network(1)
    if rank == changed_on:
        shift(None, net)
    train(net, make(net[1]))
    return net


def mean(value, weight=1.0):
    return make(network(1)).mean_over_workers(value, weight)


DISAGREEMENTS = {
    "rate": lambda: at(5, 1, lambda it, net: it.set_learning_rate(0.01)),
    "rate_two_calls": lambda: train(net := network(1), it := make(net), two_calls=True,
        each_step=lambda now: now == 1 and rank == 2 and it.set_learning_rate(0.3)),
    "wd_last_step": lambda: at(7, 2, lambda it, net: setattr(it.optimizer, "wd", 0.5)),
    "frozen_first": lambda: frozen_at(0, 2, layers=(1,)),
    "thawed": lambda: thawed(2),
    "late_load": lambda: at(0, 0, shift),
    "weights_end_of_epoch": lambda: at(5, 2, shift),
    "state_of_a_layer": lambda: behind(Centred()),
    "weights_beside_a_mask": lambda: behind(Masked(), shift),
    "no_sampler": lambda: without_sampler(lambda net: shift(None, net)),
    "order": in_another_order,
    "outside": lambda: part(changed_on=2),
    "mean_lengths": lambda: mean([1.0] * (1 + rank)),
    "mean_weight": lambda: mean(1.0, -1.0 if rank == 1 else 1.0),
    "mean_weights": lambda: mean(1.0, 0.0),
}  # fmt: skip
answer_all(DISAGREEMENTS)


# --- models that become equal ---------------------------------------------------------------------

saved = network(5)
folder = Path(os.environ.get("TMPDIR", tempfile.gettempdir()))
path = folder / f"mx-agreement-{os.getpid()}.params"
if rank == 0:  # no other worker has the file
    saved.save_parameters(str(path))


def reinitialise(net, it):
    mx.random.seed(5 + rank)
    np.random.seed(5 + rank)
    net.initialize(mx.init.Xavier(), force_reinit=True, ctx=net[0].weight.list_ctx())


def load(net, it):
    if rank == 0:
        net.load_parameters(str(path), ctx=net[0].weight.list_ctx())


def load_and_send(net, it):
    load(net, it)
    it.broadcast_parameters()


@lru_cache
def reference(optimizer):
    return alone(network(5), optimizer())


def started(change, known=True, devices=1, optimizer=sgd, **options):
    """Trains after a change that follows the creation of the trainer; returns the difference."""
    net = network(10 + rank, known, devices)
    it = make(net, optimizer())
    change(net, it)
    train(net, it, devices=devices, **options)
    return largest(weights(net), reference(optimizer))


def sent_between_steps():
    net, whole = network(1), network(1)
    it = make(net)
    train(net, it, each_step=lambda now: now == 3 and load_and_send(net, it))

    def copy(now):
        if now == 3:
            for param, value in zip(whole.collect_params().values(), weights(saved), strict=True):
                param.set_data(nd.array(value))

    return largest(weights(net), alone(whole, each_step=copy))


def sent_with_weights():
    """Gradients of means are weighted by batch sizes, parameters are not."""
    net = network(1, devices=2)
    it = make(net, mean_loss=True)
    train(net, it, epochs=1, devices=2)
    load_and_send(net, it)
    second = [param.data(mx.cpu(1)).asnumpy() for param in net.collect_params().values()]
    return max(largest(weights(net), weights(saved)), largest(second, weights(saved)))


def frozen_alike():
    net, whole = frozen_at(3, 0, 1, 2), network(1)
    params = whole[0].params.values()
    return largest(
        weights(net), alone(whole, each_step=lambda now: now == 3 and request("null", *params))
    )


def part_alike():
    net, whole = part(), network(1)
    request("null", *whole[0].params.values())
    return largest(weights(net), alone(whole))


def noise_alike():
    net, optimizer = network(1), partial(mx.optimizer.SGLD, learning_rate=0.01)
    train(net, make(net, optimizer()))
    return largest(weights(net), alone(network(1), optimizer()))


def nearly_equal():
    """Weights of one worker differ by less than what matters, before its first step."""
    slightly = lambda net: net[0].weight.set_data(net[0].weight.data() * (1 + 1e-5))  # noqa: E731
    ours = np.concatenate([each.ravel() for each in without_sampler(slightly)])
    return [float(each) for each in ours[:32]]


EQUAL = {
    "reinitialised": lambda: started(reinitialise),
    "loaded": lambda: started(load),
    "loaded_deferred": lambda: started(load, known=False),
    "loaded_threads": lambda: started(load, num_workers=2, thread_pool=True),
    "loaded_devices": lambda: started(load, devices=2),
    "loaded_two_calls": lambda: started(load, two_calls=True),
    "sent": lambda: started(load_and_send),
    "schedule": lambda: started(load, optimizer=lambda: sgd(mx.lr_scheduler.CosineScheduler(8))),
    "schedule_from_one": lambda: started(load, optimizer=lambda: sgd(FromOne())),
    "sent_between_steps": sent_between_steps,
    "sent_with_weights": sent_with_weights,
    "frozen_alike": frozen_alike,
    "part_alike": part_alike,
    "noise_alike": noise_alike,
    "thawed_alike": lambda: largest(weights(thawed(0, 1, 2)), weights(thawed())),
}
for name, case in EQUAL.items():
    result(name, case())
result("moved", largest(weights(saved), reference(sgd)))
result("nearly_equal", nearly_equal())
result("mean", [
    mean(0.1 * (rank + 1), weight=(rank + 1) / 3).hex(),
    mean(np.array([[rank, 1e300 * rank]]), weight=3 - rank).tolist(),
    mean(float("nan") if rank == 1 else 0.1, weight=float(rank != 1)),
    mean(nd.array([rank])).tolist(),
])  # fmt: skip
