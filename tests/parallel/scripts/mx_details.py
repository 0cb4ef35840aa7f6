"""Details of the trainer on workers whose networks have other names, and whose threads race."""

import gc
import sys
import threading
import time
import weakref
from pathlib import Path
from unittest.mock import patch

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mx_parts import largest, weights
from mxnet import autograd, gluon, nd
from report import _answer, result

from lbbsp_core.runtime.checkpoint.checkpoint import read_checkpoint
from lbbsp_core.testing import ChangingPlans
from lbbsp_mx.layers import batchnorm
from lbbsp_mx.reliability import liveness
from lbbsp_mx.reliability.states import optimizer_state

FOLDER = Path(sys.argv[1])
X, SAMPLES, STEPS, SAVES = 24, 96, 3, 25
USES = 18  # more than the 16 threads on which MXNet runs such operators by default
PLANS = ((12, 8, 4), (5, 16, 3), (2, 9, 13))
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 5)).astype("f4")
FACTORS = [float(factor) for factor in rng.normal(size=USES)]
STORE = lbbsp_mx.KVStore()
RANK = STORE.rank


def trainer_of(params, optimizer, **options):
    return lbbsp_mx.Trainer(params, optimizer, options, kvstore=lbbsp_mx.KVStore(),
                            global_batch_size=X, policy=ChangingPlans(PLANS))  # fmt: skip


# --- layers that are used several times, with equal names, of networks that are freed -------------


def network(norm, prefix=None, hybrid=False, dtype="float32"):
    net = gluon.nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(norm(in_channels=5), gluon.nn.Dense(6, in_units=5), gluon.nn.Activation("tanh"),
                norm(in_channels=6), gluon.nn.Dense(1, in_units=6))  # fmt: skip
    mx.random.seed(3)
    np.random.seed(3)
    net.initialize(mx.init.Xavier())
    net.cast(dtype)
    if hybrid:
        net.hybridize()
    return net


def learn(nets, trainers, draw, uses):
    """Uses every network several times before the backward pass."""
    for step in range(STEPS):
        x = nd.array(FEATURES[draw(step)], dtype=both(nets)[0].dtype)
        inputs = [x * f + f for f in FACTORS[:uses]]
        for each in inputs:
            each.attach_grad()  # MXNet then runs the backward passes of the uses at the same time
        with autograd.record():
            losses = [(net(each) - f) ** 2 for f, each in zip(FACTORS, inputs, strict=False)
                      for net in nets]  # fmt: skip
        autograd.backward(losses)
        for trainer in trainers:
            trainer.step(len(x))


def both(nets):
    return [param for net in nets for param in net.collect_params().values()]


def difference(prefixes, uses, hybrid, dtype="float32"):
    """Largest difference between these workers and one process, and how much was learned."""
    nets = [network(lbbsp_mx.SyncBatchNorm, prefix, hybrid, dtype) for prefix in prefixes]
    start = [each for net in nets for each in weights(net)]
    rate = 0.01 / uses
    trainers = [trainer_of(net.collect_params(), "sgd", learning_rate=rate) for net in nets]
    batches, *_ = [iter(each.batch_sampler(SAMPLES, seed=0)) for each in trainers]
    learn(nets, trainers, lambda step: next(batches), uses)
    ours = [each for net in nets for each in weights(net)]
    order = np.random.default_rng((0, 0)).permutation(SAMPLES)
    found = {"moved": largest(ours, start)}
    for name, norm in (("stock", gluon.nn.BatchNorm), ("alone", lbbsp_mx.SyncBatchNorm)):
        wholes = [network(norm, dtype=dtype) for _ in prefixes]
        whole = lbbsp_mx.Trainer(both(wholes), "sgd", {"learning_rate": rate}, kvstore="local",
                                 global_batch_size=X)  # fmt: skip
        learn(wholes, [whole], lambda step: order[step * X : (step + 1) * X], uses)
        theirs = [each for net in wholes for each in weights(net)]
        # Stock layers update running moments in the backward pass, in any order of the uses.
        moving = [name == "stock" and param.grad_req == "null" for param in both(wholes)]
        found[name] = largest(*([w for w, moves in zip(each, moving, strict=True) if not moves]
                                for each in (ours, theirs)))  # fmt: skip
    return found


backward = batchnorm._Operator.backward


def late_backward(self, **arrays):
    if self._use % STORE.num_workers == RANK:  # these become ready last on this worker
        time.sleep(0.02)
    return backward(self, **arrays)


batchnorm._Operator.backward = late_backward
for _ in range(RANK):  # names of layers are numbered by process
    gluon.nn.HybridSequential().add(gluon.nn.Dense(1), lbbsp_mx.SyncBatchNorm())
result("many_uses", difference([None], USES, hybrid=False))
result("many_uses_compiled", difference([None], 3, hybrid=True))
result("double", difference([None], 2, hybrid=False, dtype="float64"))
freed = network(lbbsp_mx.SyncBatchNorm, "net_")
if RANK == 1:
    del freed
    gc.collect()
result("one_prefix", difference(["net_", "net_"], 2, hybrid=True))

twice = [network(lbbsp_mx.SyncBatchNorm, "net_") for _ in range(2)]
result("equal_names", _answer(lambda: trainer_of(both(twice), "sgd")))

# --- one file of all workers, which are read meanwhile --------------------------------------------


def deep(layers=12):
    net = gluon.nn.HybridSequential(prefix="deep_")
    with net.name_scope():
        for _ in range(layers):
            net.add(gluon.nn.Dense(5, in_units=5))
    mx.random.seed(4)
    np.random.seed(4)
    net.initialize(mx.init.Xavier(magnitude=2))
    return net


def descend(net, trainer, draw, steps):
    for step in steps:
        x = nd.array(FEATURES[draw(step)])
        with autograd.record():
            loss = ((net(x) - 1) ** 2).sum(axis=1)
        loss.backward()
        trainer.step(len(x))


def saved_together():
    net = deep(2)
    trainer = trainer_of(net.collect_params(), "adam")
    descend(net, trainer, lambda step: np.arange(trainer.sizes[RANK]), range(2))
    path, done, reads = FOLDER / "together", threading.Event(), []
    trainer.save_states(str(path))
    STORE.barrier()

    def read():
        while not done.is_set():
            reads.append(read_checkpoint(path).step)

    reader = threading.Thread(target=read)
    if RANK == 0:
        reader.start()
        while not reads:
            time.sleep(0.001)
    for _ in range(SAVES):
        trainer.save_states(str(path))
    STORE.barrier()
    done.set()
    if RANK == 0:
        reader.join()
    state = optimizer_state(trainer)[0]
    trainer.load_states(str(path))
    left = [each.name for each in FOLDER.iterdir() if each.name.startswith("together")]
    return {"reads": len(reads), "steps": sorted(set(reads)), "left": left,
            "same": state == optimizer_state(trainer)[0]}  # fmt: skip


result("together", saved_together())

# --- trainers in a loop ---------------------------------------------------------------------------


def created():
    net = deep(2)
    trainer = trainer_of(net.collect_params(), "adam")
    descend(net, trainer, lambda step: np.arange(trainer.sizes[RANK]), range(2))
    return weakref.ref(trainer)


trainers = [created() for _ in range(5)]
gc.collect()
result("alive", [each() is not None for each in trainers])

# --- MXNet's profiler, started while threads of this library call MXNet ---------------------------


def profiled():
    net = deep(2)
    trainer = trainer_of(net.collect_params(), "adam")
    mx.profiler.set_config(profile_api=True, filename=str(FOLDER / f"profile{RANK}"))
    looks, beats = [], liveness.Nodes.has_heartbeat
    look = lambda *args: (looks.append(args), beats(*args))[1]  # noqa: E731
    with patch.object(liveness.Nodes, "has_heartbeat", look):
        while len(looks) < 3:
            mx.profiler.set_state("run")
            mx.profiler.set_state("stop")
    for step in range(STEPS):
        descend(net, trainer, lambda step: np.arange(trainer.sizes[RANK]), [step])
        mx.profiler.set_state("run")
        mx.profiler.pause()
        mx.profiler.resume()
        mx.profiler.set_state("stop")
    return trainer._session.step


result("profiled", profiled())
