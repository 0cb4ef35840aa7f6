"""A job that is broken once and restarted: ``mx_restart.py FOLDER FAULT STEP RANK``."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
import psutil
from mx_parts import largest, weights
from mxnet import autograd, gluon
from report import result

from lbbsp_core.runtime.checkpoint.checkpoint import newest_checkpoint
from lbbsp_core.runtime.options import env
from lbbsp_core.runtime.reliability import preemption
from lbbsp_core.runtime.reliability.exit import end_now
from lbbsp_core.testing import ChangingPlans

folder, fault, place = sys.argv[1], sys.argv[2], tuple(map(int, sys.argv[3:5]))
X, STEPS, EPOCHS = 24, 5, 3
SAMPLES = X * STEPS
PLANS = {1: ((24,),), 2: ((16, 8), (5, 19)), 3: ((12, 8, 4), (2, 2, 20), (8, 8, 8))}
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 4)).astype("f4")
LABELS = (FEATURES.sum(axis=1) > 0).astype("f4")
NUMBERED = gluon.data.ArrayDataset(FEATURES, LABELS, np.arange(SAMPLES))
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()


def network(norm=lbbsp_mx.SyncBatchNorm):
    mx.random.seed(0)
    np.random.seed(0)
    net = gluon.nn.HybridSequential()
    dense = gluon.nn.Dense(8, use_bias=False, activation="tanh")
    net.add(dense, norm(in_channels=8), gluon.nn.Dense(2, in_units=8))
    net.initialize(mx.init.Xavier())
    return net


def options():
    return {"learning_rate": 0.02, "lr_scheduler": mx.lr_scheduler.FactorScheduler(4, 0.7)}


def break_job(step):
    if (step, trainer.kvstore.rank) != place or env.restart():
        return
    if fault.startswith("kill"):
        while not newest_checkpoint(folder):  # which is written behind
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "preempt":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "everyone":  # of the job, as a machine that is taken away; but not the launcher
        root, found = "DMLC_PS_ROOT_PORT", []
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                if each.environ().get(root) == os.environ[root]:
                    found.append(str(each.pid))
        subprocess.run(["kill", *found], check=True)  # loaders obey this process itself


def end_together(status):
    """Ends this worker when the other ones end, too: those would miss one that is long gone."""
    ends = [Path(folder, f"ends-{rank}") for rank in range(workers)]
    ends[trainer.kvstore.rank].touch()
    while not all(end.exists() for end in ends):
        time.sleep(0.01)
    end_now(status)


net = network()  # with a parameter whose shape the first batch tells
workers = int(os.environ["DMLC_NUM_WORKER"])
trainer = lbbsp_mx.Trainer(
    net.collect_params(),
    "adam",
    options(),
    global_batch_size=X,
    policy=ChangingPlans(PLANS[workers]),
    seed=1,
)
sampler = trainer.batch_sampler(SAMPLES)
loader = gluon.data.DataLoader(
    NUMBERED,
    batch_sampler=sampler,
    num_workers=1,
    thread_pool=fault not in ("everyone", "kill_loading"),
)
found = trainer.resume(folder, every=4)
result(f"attempt_{env.restart()}", [workers, found, trainer._session.step])
for _ in range(trainer.epoch, EPOCHS):
    for x, y, samples in loader:
        step = trainer._session.step
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        result(f"step_{step}_{env.restart()}", samples.asnumpy().tolist())
        trainer.step(len(x))  # after it the worker may leave
        break_job(step)
if fault == "late":  # after the last step, of which the trainer does not know
    preemption._STEP_SECONDS = 1.0
    preemption.end_now = end_together
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(300)  # an evaluation
trainer._session.finish_barrier()

# The same by stock gluon in one process, on whole batches.
alone = network(gluon.nn.BatchNorm)
stock = gluon.Trainer(alone.collect_params(), "adam", options(), kvstore=None)
for step in range(STEPS * EPOCHS):
    rows = sampler.order.indices(step)
    with autograd.record():
        loss = loss_of(alone(mx.nd.array(FEATURES[rows])), mx.nd.array(LABELS[rows]))
    loss.backward()
    stock.step(len(rows))
result("difference", largest(weights(net), weights(alone)))
untrained = network()
untrained(mx.nd.array(FEATURES[:1]))
result("moved", largest(weights(untrained), weights(alone)))
