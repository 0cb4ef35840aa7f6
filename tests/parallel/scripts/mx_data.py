"""Draws data in every way on several workers, and reports batches and weights: ``mx_data.py DIR``.

Each worker's random numbers differ.
"""

import sys

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mxnet import autograd, gluon, nd
from report import answer_all, result

import lbbsp_core
from lbbsp_core.testing import ChangingPlans

folder, X, SAMPLES, EPOCHS = sys.argv[1], 24, 79, 2
PLANS = ((16, 5, 3), (4, 18, 2), (8, 8, 8), (1, 9, 14))
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 4)).astype("f4")
LABELS = rng.normal(size=SAMPLES).astype("f4")
WORK = rng.lognormal(size=SAMPLES)
NUMBERED = gluon.data.SimpleDataset(list(range(SAMPLES)))
DATA = gluon.data.ArrayDataset(FEATURES, LABELS)
LOSS = gluon.loss.L2Loss()
store = lbbsp_mx.KVStore("dist_sync")
np.random.seed(10 + store.rank)


class Buckets:
    """Batches of samples of like length: three full ones, and two short ones."""

    def __len__(self):
        return 5

    def __iter__(self):
        order = np.random.permutation(SAMPLES)
        batches = [*np.split(order, [24, 48, 55]), order[:4]]
        for number in np.random.permutation(5):
            yield batches[number].tolist()


class Part:
    """Each worker's own samples, as scripts for plain kvstores draw them."""

    def __init__(self, items):
        self.items = list(items)

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return iter(np.random.permutation(self.items).tolist())


class Failing(Part):
    """Raises on one worker."""

    def __iter__(self):
        if store.rank == 1:
            raise OSError("the list of files is gone")
        return iter(self.items)


def network():
    net = gluon.nn.Dense(1, use_bias=False, in_units=4)
    net.initialize(mx.init.Zero())
    return net


def trainer_of(net, policy=None):
    return lbbsp_mx.Trainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 0.1},
        kvstore=lbbsp_mx.KVStore(),
        global_batch_size=X,
        policy=policy or ChangingPlans(PLANS),
    )


def learn(net, trainer, index):
    with autograd.record():
        loss = LOSS(net(nd.array(FEATURES[index])), nd.array(LABELS[index]))
    loss.backward()
    trainer.step(len(index))


def epochs_of(sampler, net, trainer, epochs=EPOCHS):
    drawn = []
    for _ in range(epochs):
        for index in sampler:
            drawn.append(index)
            learn(net, trainer, index)
    return drawn


def sampled(sampler, loading=None, work=None):
    net = network()
    trainer = trainer_of(net)
    made = trainer.batch_sampler(DATA, sampler=sampler, work=work)
    if loading is None:
        return net, epochs_of(made, net, trainer)
    loader = gluon.data.DataLoader(NUMBERED, batch_sampler=made, **loading)
    numbers = (batch.asnumpy().astype(int).tolist() for _ in range(EPOCHS) for batch in loader)
    return net, epochs_of(numbers, net, trainer, 1)


def in_order():
    net = network()
    trainer = trainer_of(net)
    return net, epochs_of(trainer.batch_sampler(DATA, shuffle=False), net, trainer)


def iterator():
    net, drawn = network(), []
    trainer = trainer_of(net)
    numbers = {"data": FEATURES, "index": np.arange(SAMPLES)}
    source = mx.io.NDArrayIter(numbers, LABELS, batch_size=8)
    train = lbbsp_mx.PlannedIter(trainer.batch_sampler(SAMPLES, seed=1), source)
    for _ in range(EPOCHS):
        train.reset()
        for batch in train:
            (x, index), (y,) = batch.data, batch.label
            drawn.append(index.asnumpy().astype(int).tolist())
            with autograd.record():
                loss = LOSS(net(x), y)
            loss.backward()
            trainer.step(x.shape[0])
    return net, drawn


def beside():
    """Two loaders that prefetch; the order of 31 other samples is reported instead."""
    net, drawn = network(), []
    trainer = trainer_of(net)
    sampler = trainer.batch_sampler(SAMPLES)
    others = gluon.data.SimpleDataset(list(range(31)))
    companion = trainer.batch_sampler(others, beside=sampler)
    options = {"num_workers": 2, "thread_pool": True}
    pair = [
        gluon.data.DataLoader(data, batch_sampler=each, **options)
        for data, each in ((NUMBERED, sampler), (others, companion))
    ]
    for _ in range(EPOCHS):
        for a, b in zip(*pair, strict=True):
            assert len(a) == len(b)
            drawn.append(b.asnumpy().tolist())
            learn(net, trainer, a.asnumpy().astype(int))
    return net, drawn


def restarted(work=None):
    """The second step of an epoch is followed by a restart with other random numbers."""
    net = network()
    trainer = trainer_of(net)
    drawn = []
    order = {"sampler": gluon.data.RandomSampler(SAMPLES), "work": work}
    for index in trainer.batch_sampler(DATA, **order):
        drawn.append(index)
        learn(net, trainer, index)
        if len(drawn) == 2:
            break
    trainer.save(folder)
    net = network()
    trainer = trainer_of(net)
    sampler = trainer.batch_sampler(DATA, **order)
    assert trainer.resume(folder)
    return net, drawn + epochs_of(sampler, net, trainer)


def other_work():
    net = network()
    trainer = trainer_of(net)
    epochs_of(trainer.batch_sampler(DATA, work=np.roll(WORK, rank)), net, trainer)


def rows():
    net = network()
    trainer = trainer_of(net, lbbsp_core.FixedShares([3, 2, 1]))
    matrix = np.arange(72).reshape(X, 3)  # a step is a column, whose rows continue
    drawn = [matrix[trainer.rows, column].tolist() for column in range(3)]
    for index in drawn:
        learn(net, trainer, index)
    return net, drawn


def sampler_of(data, **options):
    trainer_of(network()).batch_sampler(data, **options)


def noisy():
    """Random transforms: each reading differs, so that nothing can be compared."""
    sampler_of(DATA.transform_first(lambda x: x + np.random.normal()))
    raise RuntimeError("accepted")


rank, workers = store.rank, store.num_workers
CASES = {
    "sampler": lambda: sampled(gluon.data.RandomSampler(SAMPLES)),
    "sampler_threads": lambda: sampled(
        gluon.data.RandomSampler(SAMPLES), {"num_workers": 2, "thread_pool": True}
    ),
    "weighted": lambda: sampled(Part(np.random.randint(0, SAMPLES, 60))),
    "buckets": lambda: sampled(Buckets()),
    "in_order": in_order,
    "iterator": iterator,
    "beside": beside,
    "restarted": restarted,
    "rows": rows,
    "by_work": lambda: sampled(None, {"num_workers": 2, "thread_pool": True}, WORK),
    "buckets_by_work": lambda: sampled(Buckets(), work=WORK),
    "restarted_by_work": lambda: restarted(WORK),
}
MISUSES = {
    "part_of_a_length": lambda: sampler_of(DATA.take(60 + rank)),
    "part_of_data": lambda: sampler_of(DATA.shard(3, rank).take(26)),
    "part_of_ranges": lambda: sampler_of(SAMPLES, sampler=Part(range(rank * 26, rank * 26 + 26))),
    "part_of_strides": lambda: sampler_of(SAMPLES, sampler=Part(range(rank, 78, workers))),
    "failing": lambda: sampler_of(SAMPLES, sampler=Failing(range(SAMPLES))),
    "beside_length": lambda: sampler_of(
        50 + rank, beside=trainer_of(network()).batch_sampler(SAMPLES)
    ),
    "rows_of_a_plan": lambda: trainer_of(network()).rows,
    "random_transform": noisy,
    "work_beside": lambda: sampler_of(
        50, beside=trainer_of(network()).batch_sampler(SAMPLES), work=WORK
    ),
    "other_work": other_work,
}
for name, case in CASES.items():
    net, drawn = case()
    result(name, drawn)
    result(f"{name}_weights", net.weight.data().asnumpy()[0].tolist())
answer_all(MISUSES, MISUSES)
