"""A balanced run on several workers, in which one may fail: ``mx_training.py MODE``."""

import os
import signal
import sys

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
import psutil
from mxnet import autograd, gluon

mode, X, EPOCHS = sys.argv[1], 48, 4
mx.random.seed(0)
net = gluon.nn.HybridSequential()
for channels in (1, 16, 16):
    net.add(gluon.nn.Conv2D(16, 3, activation="relu", in_channels=channels))
net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(2, in_units=16))
net.initialize(mx.init.Xavier())
net.hybridize()
trainer = lbbsp_mx.Trainer(
    net.collect_params(), "sgd", {"learning_rate": 0.01}, global_batch_size=X
)
images = np.random.default_rng(0).normal(size=(480, 1, 32, 32)).astype("f4")
labels = (images.mean(axis=(1, 2, 3)) > 0).astype("f4")
data = gluon.data.ArrayDataset(images, labels)
loader = gluon.data.DataLoader(data, batch_sampler=trainer.batch_sampler(len(data)))
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()


def fail():
    if mode in ("server", "scheduler"):
        for process in psutil.Process(os.getppid()).children():
            if process.pid != os.getpid() and process.environ().get("DMLC_ROLE") == mode:
                process.kill()
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "raise":
        raise RuntimeError("the data base is gone")
    if mode == "exit":
        sys.exit(3)


steps = 0
for _ in range(EPOCHS):
    for x, y in loader:
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(len(x))
        steps += 1
        if steps == 6 and trainer.kvstore.rank == 1:
            fail()
