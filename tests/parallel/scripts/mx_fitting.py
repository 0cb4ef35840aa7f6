"""One cluster, many trainings: loaders, epochs left half-way, saved states, the estimator."""

import sys
from pathlib import Path

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mx_parts import largest, weights
from mxnet import autograd, gluon
from mxnet.gluon.contrib.estimator import BatchEnd, CheckpointHandler, Estimator
from report import result

from lbbsp_core import Profile
from lbbsp_core.testing import ChangingPlans

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
    options = {"policy": ChangingPlans(PLANS), "seed": 3, **options}
    momentum = {"learning_rate": 0.1, "momentum": 0.9}
    return lbbsp_mx.Trainer(net.collect_params(), "sgd", momentum, global_batch_size=X, **options)


def epoch(it, net, loader, steps=STEPS, drawn=None, sizes=None):
    for number, (x, y, samples) in enumerate(loader, start=1):
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        it.step(len(x))
        if drawn is not None:
            drawn.extend(int(i) for i in samples.asnumpy())
        if sizes is not None:
            sizes.append(len(x))
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
    result(f"lag_{name}", it._session.balancer.schedule.lag)

# Memory limits, which workers exchange in the first step, do not change batches drawn before it.
net, drawn, sizes = network(), [], []
profile = Profile([4, 8], [0.004, 0.008], out_of_memory_at=9) if it.kvstore.rank == 0 else None
it = trainer(net, policy="lbbsp", cost=profile)
epoch(it, net, loader(it, num_workers=1, thread_pool=True), drawn=drawn, sizes=sizes)
result("drawn_memory", drawn)
result("sizes_memory", sizes)

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

# The same by a checkpoint of all, with batches drawn ahead, at the step and at an epoch's end.
folder = shared / "checkpoints"
parts, again, drawn = network(), network(), []
first = trainer(parts)
data = loader(first, num_workers=1, thread_pool=True)
result("no_checkpoint", first.load(folder))
epoch(first, parts, data, steps=4, drawn=drawn)
first.save(folder)
epoch(first, parts, data, steps=2)  # lost: the job is killed here
second = trainer(again)
data = loader(second, num_workers=1, thread_pool=True)
result("checkpoint", [second.load(folder), second.epoch, second.learning_rate])
epoch(second, again, data, drawn=drawn)
second.save(folder)
third, last = trainer(network()), network()
third = trainer(last)
third.load(folder)
data = loader(third)  # created after the load
result("checkpoint_at_end", third.epoch)
epoch(third, last, data)
result("drawn_over_a_checkpoint", drawn)
result("over_a_checkpoint", largest(weights(whole), weights(last)))
result("generations", sorted(path.name for path in folder.glob("step*")))

# Checkpoints and files of other jobs are refused.


def refusal(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


other = trainer(network())
other.load(folder)
result("other_data", refusal(lambda: other.batch_sampler(SAMPLES - X)))
other = trainer(network())
other.batch_sampler(SAMPLES, seed=4)
result("other_seed", refusal(lambda: other.load(folder)))
result("other_seed_states", refusal(lambda: other.load_states(mine)))
wide = gluon.nn.Dense(3, in_units=4)
wide.initialize()
other = trainer(wide)
other.batch_sampler(SAMPLES)
result("other_network", refusal(lambda: other.load(folder)))
adam = lbbsp_mx.Trainer(network().collect_params(), "adam", global_batch_size=X, seed=3)
adam.batch_sampler(SAMPLES)
result("other_optimizer", refusal(lambda: adam.load(folder)))
own = shared / f"own-{it.kvstore.rank}"
own.mkdir()
first.kvstore.barrier()
if it.kvstore.rank == 0:
    (own / "step-000000004.npz").write_bytes((folder / "step-000000004.npz").read_bytes())
try:
    trainer(network()).load(own)
    result("own_folders", "no error")
except Exception as error:
    result("own_folders", f"{type(error).__name__}: {error}")

# The estimator with checkpoints: the second one continues the first one's epoch, the third is done.
pairs = gluon.data.ArrayDataset(FEATURES, LABELS)


class Counts(BatchEnd):
    steps = 0

    def batch_end(self, estimator, *args, **kwargs):
        self.steps += 1
        return self.steps == self.limit


def estimate(limit, amount):
    net = network()
    it = trainer(net)
    data = gluon.data.DataLoader(pairs, batch_sampler=it.batch_sampler(SAMPLES))
    estimator, counts = Estimator(net, loss_of, trainer=it), Counts()
    estimator.logger.handlers.clear()
    counts.limit = limit
    handlers = [lbbsp_mx.LoadBalancingHandler(checkpoint=shared / "estimator", every=4), counts]
    estimator.fit(data, event_handlers=handlers, **amount)
    return counts.steps, largest(weights(whole), weights(net))


amounts = [{"batches": 5}, {"epochs": 2}, {"epochs": 2}, {"batches": 12}]
limits = [5, None, None, None]
result("estimated", [estimate(*each) for each in zip(limits, amounts, strict=True)])


# Gluon's own checkpoints, of which the newest is kept; the second estimator continues from it.
def save(epochs, folder, **options):
    net = network()
    it = trainer(net)
    data = gluon.data.DataLoader(pairs, batch_sampler=it.batch_sampler(SAMPLES))
    estimator, written = Estimator(net, loss_of, trainer=it), []
    estimator.logger.handlers.clear()
    write = net.save_parameters
    net.save_parameters = lambda name: written.append(name) or write(name)
    folder = shared / folder.format(it.kvstore.rank)
    folder.mkdir(exist_ok=True)  # the handler fails where another worker creates it meanwhile
    keeps = CheckpointHandler(str(folder), max_checkpoints=1, **options)
    handlers = [lbbsp_mx.LoadBalancingHandler(), keeps]
    estimator.fit(data, epochs=epochs, event_handlers=handlers)
    return len(written), largest(weights(whole), weights(net))


for folder in ("saved", "saved_by_{}"):
    written = save(1, folder, batch_period=1, epoch_period=None)[0]
    files = len(list((shared / folder.format(it.kvstore.rank)).iterdir()))
    result(folder, [written, files, *save(2, folder, resume_from_checkpoint=True)])
