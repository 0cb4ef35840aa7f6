"""A machine is taken away: SIGTERM to a worker and to its processes that load data, all at once.

Usage: loading.py FOLDER before|later, when these processes start: before the strategy, or with the
first item.
"""

import multiprocessing
import os
import subprocess
import sys
import time

import keras
import numpy as np
import patience  # noqa: F401, before lbbsp
import tensorflow as tf

import lbbsp_tf

X = 16


def load(number):
    time.sleep(0.2)  # the signal arrives meanwhile
    return np.full((X // 2, 4), number, "f4")


class Batches(keras.utils.PyDataset):
    pool = multiprocessing.Pool(2) if sys.argv[2] == "before" else None

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if Batches.pool is None:
            Batches.pool = multiprocessing.Pool(2)
        return np.concatenate(Batches.pool.map(load, range(2))), np.zeros((X, 1), "f4")


class TakeAway(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            time.sleep(0.1)
            pids = [*(each.pid for each in multiprocessing.active_children()), os.getpid()]
            # Loaders obey this process itself.
            subprocess.run(["kill", *map(str, pids)], check=True)


strategy = tf.distribute.MultiWorkerMirroredStrategy()
balancer = lbbsp_tf.LoadBalancer(
    strategy, X, checkpoint=sys.argv[1], every=1000, weight_by="samples"
)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(
    balancer.dataset(Batches()),
    steps_per_epoch=balancer.steps_per_epoch,
    callbacks=[balancer, TakeAway()],
    verbose=0,
)
