"""Every way to misuse the trainer on a cluster; each must raise alike on all workers."""

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon.contrib.estimator import Estimator
from report import answer_all, listening, result

from lbbsp_core import Ema, Limits, LoadBalanced

X = 16
store = lbbsp_mx.KVStore("dist_sync")
data = gluon.data.ArrayDataset(np.ones((64, 4), "f4"), np.zeros(64, "f4"))
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()


def network(units=2, **options):
    net = gluon.nn.Dense(units, in_units=4, **options)
    net.initialize()
    return net


def trainer(net=None, optimizer="sgd", kvstore=store, **options):
    options = {"global_batch_size": X, **options}
    params = (net or network()).collect_params()
    return lbbsp_mx.Trainer(params, optimizer, kvstore=lbbsp_mx.KVStore()
                            if kvstore is store else kvstore, **options)  # fmt: skip


def train(it=None, net=None, samples=64, seed=0, **options):
    net = net or network()
    it = it or trainer(net, **options)
    part = gluon.data.ArrayDataset(*(values[:samples] for values in data._data))
    loader = gluon.data.DataLoader(part, batch_sampler=it.batch_sampler(samples, seed))
    for x, y in loader:
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        it.step(len(x))


def noise(**options):
    net = network()
    it = trainer(net, **options)
    mx.random.seed(rank)
    train(it, net)


def add(net):
    net.collect_params().setattr("grad_req", "add")
    return net


class Mean(gluon.loss.SoftmaxCrossEntropyLoss):
    def hybrid_forward(self, F, *args, **options):
        return F.mean(super().hybrid_forward(F, *args, **options))


def estimate(loss=loss_of, make=trainer):
    net = network()
    it = make(net)
    sampler = it.batch_sampler(64) if isinstance(it, lbbsp_mx.Trainer) else None
    loader = gluon.data.DataLoader(data, batch_sampler=sampler) if sampler else (
        gluon.data.DataLoader(data, batch_size=8))  # fmt: skip
    estimator = Estimator(net, loss, trainer=it)
    estimator.fit(loader, epochs=1, event_handlers=[lbbsp_mx.LoadBalancingHandler()])


def synchronised(**options):
    net = gluon.nn.Sequential()
    devices = options.pop("devices", 1)
    net.add(gluon.nn.Dense(4, in_units=4), lbbsp_mx.SyncBatchNorm(in_channels=4))
    net.initialize(ctx=[mx.cpu(i) for i in range(devices)])
    return trainer(net, **options)


def unconnected():
    net = lbbsp_mx.SyncBatchNorm(in_channels=4)
    net.initialize()
    with autograd.record():
        net(nd.ones((2, 4)))


def diverge():
    """The weights of one worker change in the fifth step, and are compared in the seventh."""
    net = network()
    it = trainer(net, compare_weights=6)
    for _ in range(3):
        for x, y in gluon.data.DataLoader(data, batch_sampler=it.batch_sampler(64)):
            with autograd.record():
                loss = loss_of(net(x), y)
            loss.backward()
            it.step(len(x))
            if rank and it._session.step == 4:
                net.weight.set_data(net.weight.data() + 1)


rank = store.rank


def names_for_objects():
    """One worker is given names, the other one the objects that they stand for."""
    policy, predictor = LoadBalanced(min_gain=0.0), Ema(0.5)
    objects = {"policy": policy, "predictor": predictor, "limits": Limits(1, 12)}
    names = {"policy": "lbbsp:min_gain=0", "predictor": "ema0.5", "limits": 12}
    train(**(names if rank else objects))


CASES = {
    "names_for_objects": names_for_objects,
    "no_sampler": lambda: trainer().step(8),  # the right size, by chance
    "other_size": lambda: trainer().step(5),
    "update_alone": lambda: trainer().update(8),
    "unknown_store": lambda: trainer(kvstore="dist_magic"),
    "second_kind": lambda: trainer(kvstore="dist_device_sync"),
    "mean_and_add": lambda: trainer(add(network()), mean_loss=True),
    "estimator_mean": lambda: estimate(Mean()),
    "estimator_trainer": lambda: estimate(
        make=lambda net: gluon.Trainer(net.collect_params(), "sgd", kvstore=None)
    ),
    "norm_mean": lambda: synchronised(mean_loss=True),
    "norm_devices": lambda: synchronised(devices=2),
    "norm_unconnected": unconnected,
    "unknown_option": lambda: trainer(polcy=LoadBalanced()),
    "different_seed": lambda: train(seed=7 * rank),
    "different_batch": lambda: train(global_batch_size=16 - 8 * rank),
    "different_samples": lambda: train(samples=64 - rank),
    "different_layer": lambda: trainer(network(2 + rank)),
    "different_rate": lambda: trainer(optimizer=mx.optimizer.SGD(learning_rate=0.1 + 0.1 * rank)),
    "different_schedule": lambda: trainer(
        optimizer=mx.optimizer.SGD(lr_scheduler=mx.lr_scheduler.FactorScheduler(10 + rank))
    ),
    "different_weights": diverge,
    "different_noise": lambda: noise(optimizer="sgld"),
    "different_loss": lambda: train(mean_loss=bool(rank)),
}


store.barrier()  # all processes listen now
result("addresses", listening())
answer_all(CASES)
