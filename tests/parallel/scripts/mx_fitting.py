"""One cluster, many trainings: loaders, epochs left half-way, saved states, the estimator."""

import sys
from pathlib import Path

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mx_parts import Cycle, largest, weights
from mxnet import autograd, gluon
from mxnet.gluon.contrib.estimator import BatchEnd, Estimator
from report import result

X, STEPS = 32, 6
SAMPLES = X * STEPS
shared = Path(sys.argv[1])
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 4)).astype("f4")
LABELS = (FEATURES.sum(axis=1) > 0).astype("f4")
NUMBERED = gluon.data.ArrayDataset(FEATURES, LABELS, np.arange(SAMPLES))
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
PLANS = ((20, 10, 2), (4, 4, 24), (11, 11, 10))


def network():
    mx.random.seed(0)
    np.random.seed(0)
    net = gluon.nn.Dense(2, in_units=4)
    net.initialize(mx.init.Xavier())
    return net


def trainer(net, **options):
    options = {"policy": Cycle(PLANS), "seed": 3, **options}
    momentum = {"learning_rate": 0.1, "momentum": 0.9}
    return lbbsp_mx.Trainer(net.collect_params(), "sgd", momentum, global_batch_size=X, **options)


def epoch(it, net, loader, steps=STEPS, drawn=None):
    for number, (x, y, samples) in enumerate(loader, start=1):
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        it.step(len(x))
        if drawn is not None:
            drawn.extend(int(i) for i in samples.asnumpy())
        if number == steps:
            break


def loader(it, **options):
    return gluon.data.DataLoader(NUMBERED, batch_sampler=it.batch_sampler(SAMPLES), **options)


# However many batches are fetched ahead, each sample comes once an epoch.
for name, options in {
    "none": {},
    "threads": {"num_workers": 2, "thread_pool": True},
    "one_ahead": {"num_workers": 2, "thread_pool": True, "prefetch": 1},
    "processes": {"num_workers": 2},
}.items():
    net, drawn = network(), []
    it = trainer(net)
    data = loader(it, **options)
    epoch(it, net, data, drawn=drawn)
    epoch(it, net, data, drawn=drawn)
    result(f"drawn_{name}", drawn)
    result(f"lag_{name}", it._session.balancer.lag)

# An epoch that all leave half-way: the next one is whole.
net, drawn = network(), []
it = trainer(net)
data = loader(it, num_workers=1, thread_pool=True)
epoch(it, net, data, steps=2)
epoch(it, net, data, drawn=drawn)
result("drawn_after_leaving", drawn)

# An epoch that one worker alone leaves half-way.
net = network()
it = trainer(net)
data = loader(it)
try:
    epoch(it, net, data, steps=2 if it.kvstore.rank == 1 else STEPS)
    epoch(it, net, data)
    result("left_alone", "no error")
except Exception as error:
    result("left_alone", f"{type(error).__name__}: {error}")

# Loaders that fetch ahead differently.
try:
    net = network()
    it = trainer(net)
    epoch(it, net, loader(it, num_workers=it.kvstore.rank, thread_pool=True))
    result("fetch_differently", "no error")
except Exception as error:
    result("fetch_differently", f"{type(error).__name__}: {error}")

# Saved in the middle of an epoch and loaded by a new trainer: the same weights, no sample lost.
whole, parts, again = network(), network(), network()
it = trainer(whole)
epoch(it, whole, loader(it))
epoch(it, whole, loader(it))
first, drawn = trainer(parts), []
epoch(first, parts, loader(first), steps=4, drawn=drawn)
mine = str(shared / f"states-{first.kvstore.rank}")
first.save_states(mine)
parts.save_parameters(mine + ".params")
again.load_parameters(mine + ".params")
second = trainer(again)
second.load_states(mine)
data = loader(second, num_workers=1, thread_pool=True)
epoch(second, again, data, drawn=drawn)
result("drawn_over_a_restart", drawn)
epoch(second, again, data)
result("restart", largest(weights(whole), weights(again)))
stale = trainer(network())
data = iter(loader(stale, num_workers=1, thread_pool=True))
next(data)
stale.load_states(mine)
try:
    next(data)
    result("stale", "no error")
except RuntimeError as error:
    result("stale", str(error))
plain = gluon.Trainer(network().collect_params(), "sgd", {"momentum": 0.9}, kvstore=None)
plain.load_states(mine)
result("plain_reads", plain.learning_rate)

# A learning rate set in the middle.
net = network()
it = trainer(net)
epoch(it, net, loader(it), steps=1)
before = weights(net)
it.set_learning_rate(0.0)
it.optimizer.momentum = 0.0
epoch(it, net, loader(it), steps=1)
result("rate", [it.learning_rate, largest(before, weights(net))])


class Stops(BatchEnd):
    """One worker alone wishes to stop."""

    def __init__(self):
        self.steps = 0

    def batch_end(self, estimator, *args, **kwargs):
        self.steps += 1
        if self.steps == 3 and estimator.trainer.kvstore.rank == 1:
            estimator.trainer.request_stop()


# The estimator: two epochs with validation, then one that a single worker wishes to end.
pairs = gluon.data.ArrayDataset(FEATURES, LABELS)
net = network()
it = trainer(net)
sampler = it.batch_sampler(SAMPLES)
data = gluon.data.DataLoader(pairs, batch_sampler=sampler)
estimator = Estimator(net, loss_of, trainer=it)
estimator.logger.handlers.clear()
estimator.fit(data, val_data=gluon.data.DataLoader(pairs, batch_size=50), epochs=2,
              event_handlers=[lbbsp_mx.LoadBalancingHandler()])  # fmt: skip
result("estimator", largest(weights(whole), weights(net)))
stops = Stops()
estimator.fit(data, epochs=1, event_handlers=[lbbsp_mx.LoadBalancingHandler(), stops])
result("estimator_stops", stops.steps)
stops = Stops()
stops.steps = 10  # no wish any more: the old one is fulfilled
estimator.fit(data, epochs=1, event_handlers=[lbbsp_mx.LoadBalancingHandler(), stops])
result("estimator_goes_on", stops.steps - 10)
