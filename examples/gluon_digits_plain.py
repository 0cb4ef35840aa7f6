"""Trains on handwritten digits with gluon: all workers get batches of the same size.

Run it on any cluster of parameter servers, or on this machine with three unequal workers:
lbbsp launch -n 3 --framework mxnet --speeds 1,1,0.4 examples/gluon_digits_plain.py
"""

import time

from lbbsp_mx.compat import restore_numpy_names

restore_numpy_names()  # MXNet 1.9.1 cannot be imported without it: apache/mxnet#21165
import mxnet as mx  # isort: skip
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

GLOBAL_BATCH_SIZE, EPOCHS = 192, 8
images, labels = load_digits(return_X_y=True)
images = np.kron(images.reshape(-1, 1, 8, 8), np.ones((1, 1, 3, 3))).astype("float32") / 16
labels = labels.astype("float32")
training = gluon.data.ArrayDataset(images[:1536], labels[:1536])

mx.random.seed(0)
net = gluon.nn.HybridSequential()
net.add(
    gluon.nn.Conv2D(32, 3, activation="relu", in_channels=1),
    gluon.nn.Conv2D(32, 3, activation="relu", in_channels=32),
    gluon.nn.MaxPool2D(4),
    gluon.nn.Dense(10, in_units=800),
)
net.initialize(mx.init.Xavier())
net.hybridize()
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
store = mx.kv.create("dist_sync")
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 2e-3}, store)
part = training.shard(store.num_workers, store.rank)
loader = gluon.data.DataLoader(part, GLOBAL_BATCH_SIZE // store.num_workers, shuffle=True)

started = time.perf_counter()
for _ in range(EPOCHS):
    for x, y in loader:
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(GLOBAL_BATCH_SIZE)
mx.nd.waitall()  # MXNet drops queued work when a process ends, and its peers wait for it
if store.rank == 0:
    read = net(mx.nd.array(images[1536:])).asnumpy().argmax(axis=1)
    print(f"{time.perf_counter() - started:.1f} seconds")
    print(f"accuracy: {np.mean(read == labels[1536:]):.4f}")
