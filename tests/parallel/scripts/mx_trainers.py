"""Two trainers on the same batches, as of a GAN, each case beside one process with all samples."""

import itertools
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mx_parts import Warnings, largest, let_gathers_take, weights
from mxnet import autograd, gluon, nd
from report import answer_all, result
from virtual_time import VirtualTime

from lbbsp_core import read_run
from lbbsp_core.policy import Even
from lbbsp_core.testing import ChangingPlans

FOLDER = Path(sys.argv[1])
X, SIZE, NOISE, EPOCHS = 24, 6, 4, 2
SAMPLES = 4 * X + 10  # a short last step
PLANS = ((14, 5, 5), (4, 14, 6), (6, 3, 15), (8, 8, 8))
rng = np.random.default_rng(0)
REAL = (rng.normal(size=(SAMPLES, SIZE)) + np.linspace(-2, 2, SAMPLES)[:, None]).astype("f4")
SEEDS = (rng.normal(size=(SAMPLES, NOISE)) * np.linspace(0.5, 2, SAMPLES)[:, None]).astype("f4")
VALUE = np.linspace(0.1, 3, SAMPLES, dtype="f4")  # weights of the samples
DATA = gluon.data.ArrayDataset(REAL, SEEDS, VALUE)
LOSS = gluon.loss.SigmoidBinaryCrossEntropyLoss()
LEADING = ("sgd", {"learning_rate": 0.3, "momentum": 0.9})
OTHER = ("nag", {"learning_rate": 0.02, "momentum": 0.5, "wd": 1e-2})


@dataclass(frozen=True)
class Case:
    """A way to train.

    `leader` has the sampler: the generator, which steps last, or the discriminator. The other one
    learns in every `every`-th iteration, of which the first is not the first one of an epoch;
    if `twice`, the discriminator learns before and after the generator.
    """

    leader: str = "generator"
    every: int = 1
    twice: bool = False
    weighted: bool = False
    clips: bool = False
    synchronised: bool = False
    loading: dict = field(default_factory=dict)


CASES = {
    "leader_last": Case(),
    "leader_first": Case(leader="discriminator"),
    "leader_first_ahead": Case(
        leader="discriminator", loading={"num_workers": 1, "thread_pool": True}
    ),
    "leader_first_every_second": Case(leader="discriminator", every=2),
    "leader_last_every_second": Case(every=2),
    "before_and_after": Case(twice=True),
    "weighted": Case(weighted=True),
    "clipped": Case(clips=True, leader="discriminator"),
    "synchronised": Case(synchronised=True),
}


def networks(case, seed, norm=lbbsp_mx.SyncBatchNorm):
    mx.random.seed(seed)
    generator, discriminator = gluon.nn.Sequential(), gluon.nn.Sequential()
    generator.add(gluon.nn.Dense(8, in_units=NOISE, activation="tanh"))
    if case.synchronised:
        generator.add(norm(in_channels=8))
    generator.add(gluon.nn.Dense(SIZE, in_units=8))
    discriminator.add(gluon.nn.Dense(8, in_units=SIZE, activation="tanh"))
    if case.synchronised:
        discriminator.add(norm(in_channels=8))
    discriminator.add(gluon.nn.Dense(1, in_units=8))
    for net in (generator, discriminator):
        net.initialize(mx.init.Uniform(0.7))
    return generator, discriminator


def iterate(case, number, batch, nets, update):
    """Makes the steps of one iteration; `update` takes the network, batch size and weight."""
    real, _, value = batch
    weight = float(value.sum().asscalar()) if case.weighted else None
    for name in ("discriminator", "generator", *(["discriminator"] if case.twice else [])):
        if name != case.leader and number % case.every != case.every - 1:
            continue
        with autograd.record():
            losses = LOSSES[name](nets, batch)
            loss = losses * value if case.weighted else losses
        loss.backward()
        update(nets[name == "discriminator"], len(real), weight)


def loss_of_discriminator(nets, batch):
    generator, discriminator = nets
    real, seeds, _ = batch
    fake = generator(seeds).detach()
    losses = LOSS(discriminator(real), nd.ones(len(real)))
    return losses + LOSS(discriminator(fake), nd.zeros(len(real)))


def loss_of_generator(nets, batch):
    generator, discriminator = nets
    return LOSS(discriminator(generator(batch[1])), nd.ones(len(batch[0])))


LOSSES = {"discriminator": loss_of_discriminator, "generator": loss_of_generator}


def clip(net):
    for param in net.collect_params().values():
        if param.grad_req != "null":
            nd.clip(param.grad(), -0.02, 0.02, out=param.grad())


def make(net, beside=None, **options):
    optimizer, rates = LEADING if beside is None else OTHER
    if beside is None:
        options = {"global_batch_size": X, "policy": ChangingPlans(PLANS), **options}
    return lbbsp_mx.Trainer(net.collect_params(), optimizer, dict(rates), beside=beside, **options)


def both(nets, leader, **options):
    """Returns the trainers by network, and the one that leads."""
    generator, discriminator = nets
    first, other = nets if leader == "generator" else (discriminator, generator)
    leads = make(first, **options)
    return {id(first): leads, id(other): make(other, beside=leads)}, leads


def together(case):
    nets = networks(case, 1 + rank)  # worker 0's weights are to count, of both
    trainers, leads = both(nets, case.leader)
    sampler = leads.batch_sampler(SAMPLES, seed=0)

    def update(net, count, weight):
        trainer = trainers[id(net)]
        given = {} if weight is None else {"weight": weight}
        if case.clips:
            trainer.allreduce_grads(batch_size=count, **given)
            clip(net)
            trainer.update(count)
        else:
            trainer.step(count, **given)

    numbers, sizes = itertools.count(), set()
    for _ in range(EPOCHS):
        for batch in gluon.data.DataLoader(DATA, batch_sampler=sampler, **case.loading):
            sizes.add(len(batch[0]))
            iterate(case, next(numbers), batch, nets, update)
    return learned(nets), len(sizes)


def alone(case):
    """Trains one process on the same batches by gluon's own trainers."""
    nets = networks(case, 1, gluon.nn.BatchNorm)
    generator, discriminator = nets
    leads = generator if case.leader == "generator" else discriminator
    trainers = {}
    for net in nets:
        optimizer, rates = LEADING if net is leads else OTHER
        trainers[id(net)] = gluon.Trainer(net.collect_params(), optimizer, dict(rates), None)
    start = learned(nets)

    def update(net, count, weight):
        for param in net.collect_params().values():
            if param.grad_req != "null":
                param.grad()[:] /= weight or count
        if case.clips:
            clip(net)
        trainers[id(net)].update(1)

    numbers = itertools.count()
    for epoch in range(EPOCHS):
        order = np.random.default_rng((0, epoch)).permutation(SAMPLES)
        for begin in range(0, SAMPLES, X):
            batch = [nd.array(each[order[begin : begin + X]]) for each in (REAL, SEEDS, VALUE)]
            iterate(case, next(numbers), batch, nets, update)
    return start, learned(nets)


def learned(nets):
    """All weights; no moving statistics, which MXNet's layer updates in the backward pass only."""
    arrays = [each for net in nets for each in weights(net)]
    names = [name for net in nets for name in net.collect_params()]
    return [a for a, name in zip(arrays, names, strict=True) if "running" not in name]


def busy_seconds(folder):
    """Trains with different slow workers in the two parts of an iteration; returns their times."""
    nets = networks(Case(), 1)
    trainers, leads = both(nets, "discriminator", policy=Even(), record=folder)
    computed = VirtualTime(leads._session.meter)
    let_gathers_take(1.0, computed, leads._session.collectives)
    sampler = leads.batch_sampler(SAMPLES, seed=0)
    slow = {id(nets[1]): 1, id(nets[0]): 2}

    def update(net, count, weight):
        computed.compute(0.2 * (rank == slow[id(net)]))
        trainers[id(net)].step(count)

    for batch in gluon.data.DataLoader(DATA, batch_sampler=sampler):
        iterate(Case(), 0, batch, nets, update)
    leads.mean_over_workers(0.0)  # the last line is written
    return [line.busy_seconds for line in read_run(folder).steps[1:]] if rank == 0 else None


def sharpness_aware(net, batch, sum_first, step):
    """Makes a step of SAM, by the gradients of weights that are moved along their gradients."""
    _, noise, value = batch
    params = [*net.collect_params().values()]

    def backward():
        with autograd.record():
            loss = net(noise).tanh().sum(axis=1) * value
        loss.backward()

    backward()
    sum_first(len(noise))
    before = [param.data().copy() for param in params]
    for param in params:
        param.data()[:] += 0.01 * param.grad()
    backward()
    for param, data in zip(params, before, strict=True):
        param.data()[:] = data
    step(len(noise))


def sharpness_aware_together():
    net = networks(Case(), 1 + rank)[0]
    trainer = make(net)
    first, sizes = make(net, beside=trainer), set()
    sampler = trainer.batch_sampler(SAMPLES, seed=0)
    for batch in gluon.data.DataLoader(DATA, batch_sampler=sampler):
        sizes.add(len(batch[0]))
        sharpness_aware(
            net, batch, lambda count: first.allreduce_grads(batch_size=count), trainer.step
        )
    return weights(net), len(sizes)


def sharpness_aware_alone():
    net = networks(Case(), 1)[0]
    trainer, start = gluon.Trainer(net.collect_params(), LEADING[0], dict(LEADING[1])), weights(net)

    def divide(count):
        for param in net.collect_params().values():
            param.grad()[:] /= count

    order = np.random.default_rng((0, 0)).permutation(SAMPLES)
    for begin in range(0, SAMPLES, X):
        batch = [nd.array(each[order[begin : begin + X]]) for each in (REAL, SEEDS, VALUE)]
        sharpness_aware(net, batch, divide, trainer.step)
    return start, weights(net)


# --- misuse ---------------------------------------------------------------------------------------


def differing_rates():
    nets = networks(Case(), 1)
    trainers, leads = both(nets, "generator")
    if rank == 2:
        trainers[id(nets[1])].set_learning_rate(0.5)
    sampler = leads.batch_sampler(SAMPLES, seed=0)
    for batch in gluon.data.DataLoader(DATA, batch_sampler=sampler):
        iterate(Case(), 0, batch, nets, lambda net, count, _: trainers[id(net)].step(count))


def thawed_beside():
    """One worker trains a layer that is frozen on the others, in two steps before the leader's."""
    nets = networks(Case(), 1)
    last = nets[1][1].collect_params()
    last.setattr("grad_req", "null")
    trainers, leads = both(nets, "generator")
    last.setattr("grad_req", "write" if rank == 2 else "null")
    sampler = leads.batch_sampler(SAMPLES, seed=0)
    step = lambda net, count, _: trainers[id(net)].step(count)  # noqa: E731
    for batch in gluon.data.DataLoader(DATA, batch_sampler=sampler):
        iterate(Case(twice=True), 0, batch, nets, step)


def other_order():
    nets = networks(Case(), 1)
    trainers, leads = both(nets, "generator")
    sampler = leads.batch_sampler(SAMPLES, seed=0)

    def update(net, count, _):
        chosen = nets[0] if rank == 1 else net
        trainers[id(chosen)].step(count, ignore_stale_grad=True)

    for batch in gluon.data.DataLoader(DATA, batch_sampler=sampler):
        iterate(Case(), 0, batch, nets, update)


def wrong_size():
    nets = networks(Case(), 1)
    trainers, leads = both(nets, "generator")
    sampler = leads.batch_sampler(SAMPLES, seed=0)
    step = lambda net, count, _: trainers[id(net)].step(count + (net is nets[1]))  # noqa: E731
    for batch in gluon.data.DataLoader(DATA, batch_sampler=sampler):
        iterate(Case(), 0, batch, nets, step)


def beside(**options):
    generator, discriminator = networks(Case(), 1)
    return make(discriminator, make(generator), **options)


def of_third():
    generator, discriminator = networks(Case(), 1)
    make(networks(Case(), 1)[0], make(discriminator, make(generator)))


def no_size():
    nets = networks(Case(), 1)
    trainers, leads = both(nets, "generator")
    sampler = leads.batch_sampler(SAMPLES, seed=0)
    for batch in gluon.data.DataLoader(DATA, batch_sampler=sampler):
        iterate(Case(), 0, batch, nets, lambda net, *_: trainers[id(net)].allreduce_grads())


def other_means():
    generator, discriminator = networks(Case(), 1)
    make(discriminator, make(generator), mean_loss=rank == 1)


def one_after_the_other():
    """A training by a sampler, then one by `sizes`: the warnings."""
    warnings.texts.clear()
    first, second = networks(Case(), 1)
    trainer = make(first)
    for indices in trainer.batch_sampler(3 * X, seed=0):
        with autograd.record():
            loss = first(nd.array(SEEDS[np.asarray(indices)]))
        loss.backward()
        trainer.step(len(indices))
    trainer = make(second)
    count = trainer.sizes[rank]
    with autograd.record():
        loss = second(nd.array(REAL[:count]))
    loss.backward()
    trainer.step(count)
    return [text for text in warnings.texts if "beside" in text]


def saved():
    _, leads = both(networks(Case(), 1), "generator")
    leads.resume(FOLDER / "checkpoints")


MISUSES = {
    "differing_rates": differing_rates,
    "thawed_beside": thawed_beside,
    "other_order": other_order,
    "wrong_size": wrong_size,
    "other_total": lambda: beside(global_batch_size=X + 1),
    "other_parts": lambda: beside(accumulate=2),
    "no_size": no_size,
    "other_means": other_means,
    "no_trainer": lambda: make(networks(Case(), 1)[0], "other"),
    "own_options": lambda: beside(seed=3),
    "own_sampler": lambda: beside().batch_sampler(SAMPLES),
    "own_checkpoint": lambda: beside().save(FOLDER / "checkpoints"),
    "checkpoint": saved,
    "of_third": of_third,
    "no_total": lambda: lbbsp_mx.Trainer(networks(Case(), 1)[0].collect_params(), "sgd"),
}


def apart():
    """Two trainers with plans of their own, which are alike: the warnings of this process."""
    nets = networks(Case(), 1)
    trainers = {id(net): make(net) for net in nets}
    sampler = trainers[id(nets[0])].batch_sampler(SAMPLES, seed=0)
    for batch in itertools.islice(gluon.data.DataLoader(DATA, batch_sampler=sampler), 3):
        iterate(Case(), 0, batch, nets, lambda net, count, _: trainers[id(net)].step(count))
    return [text for text in warnings.texts if "beside" in text]


store = lbbsp_mx.KVStore("dist_sync")
rank = store.rank
warnings = Warnings()
runs = {name: (partial(together, case), partial(alone, case)) for name, case in CASES.items()}
runs["sharpness_aware"] = sharpness_aware_together, sharpness_aware_alone
for name, (shared, single) in runs.items():
    ours, sizes = shared()
    found = {"sizes": sizes}
    if rank == 0:
        start, reference = single()
        found |= {"difference": largest(ours, reference), "moved": largest(start, reference)}
    result(name, found)
result("busy_seconds", busy_seconds(FOLDER / "run"))
assert not any("beside" in text or "between" in text for text in warnings.texts)
result("apart", apart())
result("one_after_the_other", one_after_the_other())
answer_all(MISUSES, MISUSES)
