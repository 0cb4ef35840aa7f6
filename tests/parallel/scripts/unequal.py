"""Trains on three unequal workers: ``unequal.py FOLDER CASE...``."""

import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from virtual_time import Unequal

import lbbsp_tf

L = keras.layers
strategy = tf.distribute.MultiWorkerMirroredStrategy()


def dense():
    return keras.Sequential([L.Input((8,)), L.Dense(8), L.Dense(1)])


def normalised():
    return lbbsp_tf.synchronize_batch_norm(
        keras.Sequential([L.Input((8,)), L.Dense(8), L.BatchNormalization(), L.Dense(1)])
    )


CASES = {  # seconds for a sample by rank, and the global batch size
    "even": (dense, (0.002, 0.002, 0.005), 48),
    "balanced": (dense, (0.002, 0.002, 0.005), 48),
    "normalised": (normalised, (0.0015, 0.0015, 0.00375), 120),
}


def train(build, folder, seconds, total):
    balancer = lbbsp_tf.LoadBalancer(strategy, total, weight_by="samples", record=folder)
    if build is normalised:  # its workers wait for each other in the layers, for a second each time
        compute = Unequal(balancer._session, seconds, wait_seconds=1.0)
    else:
        compute = Unequal(balancer._session, seconds, folder)
    with strategy.scope():
        model = build()
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(6 * total, 8)).astype("f4")
    computes = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: compute())
    model.fit(
        balancer.dataset(x, x[:, :1]),
        steps_per_epoch=balancer.steps_per_epoch,
        epochs=2,
        callbacks=[balancer, computes],
        verbose=0,
    )


for name in sys.argv[2:]:
    os.environ["LBBSP_POLICY"] = "observe" if name == "even" else ""
    folder = Path(sys.argv[1], name)
    folder.mkdir(exist_ok=True)
    train(CASES[name][0], folder, *CASES[name][1:])
