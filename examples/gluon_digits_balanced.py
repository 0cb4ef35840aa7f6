"""Trains on handwritten digits with gluon: faster workers get larger batches.

Run it on any cluster of parameter servers, or on this machine with three unequal workers:
lbbsp launch -n 3 --framework mxnet --speeds 1,1,0.4 examples/gluon_digits_balanced.py
"""

import time

import lbbsp_mx

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
options = {"learning_rate": 2e-3}
trainer = lbbsp_mx.Trainer(
    net.collect_params(), "adam", options, global_batch_size=GLOBAL_BATCH_SIZE
)
loader = gluon.data.DataLoader(training, batch_sampler=trainer.batch_sampler(1536, seed=0))

started = time.perf_counter()
for _ in range(EPOCHS):
    for x, y in loader:
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(len(x))
if trainer.kvstore.rank == 0:
    read = net(mx.nd.array(images[1536:])).asnumpy().argmax(axis=1)
    print(f"{time.perf_counter() - started:.1f} seconds")
    print(f"accuracy: {np.mean(read == labels[1536:]):.4f}")
