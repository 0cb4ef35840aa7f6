"""Trains until a fault of one worker: ``mx_liveness.py sync|async FAULT RANK``.

The variable MAY_END, if set, names a file without which the training does not end.
"""

import os
import signal
import subprocess
import sys
import time

import lbbsp_mx

import mxnet as mx  # isort: skip
import psutil
from mxnet import autograd, gluon
from report import result

from lbbsp_core import SSP

mode, fault, culprit = sys.argv[1], sys.argv[2], int(sys.argv[3])
X, AT, PAUSE = 8, 20, 0.01
STEPS = 100_000 if fault == "outside" else 100  # so that it comes before the end

net = gluon.nn.Dense(1, in_units=3)
net.initialize()
if mode == "async":
    params = net.collect_params()
    trainer = lbbsp_mx.AsyncTrainer(params, "sgd", sync=SSP(3), global_batch_size=X)
    rank, local, samples = trainer.rank, X // 2, 2 * STEPS * (X // 2)
else:
    limit = 30.0 if fault == "hang" else None
    trainer = lbbsp_mx.Trainer(
        net.collect_params(), "sgd", global_batch_size=X, limit_seconds=limit
    )
    rank, samples = trainer.kvstore.rank, STEPS * X
print(f"RANK {rank}", flush=True)
data = gluon.data.ArrayDataset(mx.nd.ones((samples, 3)), mx.nd.ones((samples, 1)))
loader = gluon.data.DataLoader(data, batch_sampler=trainer.batch_sampler(samples))
loss_of = gluon.loss.L2Loss()


def fail():
    print(f"FAULT {time.time()}", flush=True)
    if fault in ("server", "scheduler"):
        for process in psutil.Process(os.getppid()).children():
            if process.pid != os.getpid() and process.environ().get("DMLC_ROLE") == fault:
                process.kill()
    if fault == "raise":
        raise RuntimeError("the data base is gone")
    if fault.startswith("exit"):
        sys.exit(int(fault[4]))
    if fault == "hang":
        time.sleep(3600)
    if fault == "cut":
        subprocess.run(["ip", "link", "set", "lbbsp0", "down"], check=True)
    if fault in ("freeze", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if fault == "freeze" else signal.SIGKILL)


if fault == "exit0_at_start" and rank == culprit:
    fail()
for step, (x, y) in enumerate(loader):
    if step == AT:
        print("AT", flush=True)
        if rank == culprit:
            if fault == "break":
                break
            fail()
    if step >= AT and step % AT == 0:
        print("MORE", flush=True)
    with autograd.record():
        loss = loss_of(net(x), y)
    loss.backward()
    trainer.step(len(x))
    time.sleep(PAUSE)
    while step == STEPS - 9 and (file := os.environ.get("MAY_END")) and not os.path.exists(file):
        time.sleep(PAUSE)
if mode == "async":
    trainer.finish()
result("steps", step + 1)
