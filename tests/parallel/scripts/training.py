"""A plain balanced run on three workers, in which one may fail: ``training.py MODE``."""

import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import lbbsp_core
import lbbsp_tf

mode = sys.argv[1]
strategy = tf.distribute.MultiWorkerMirroredStrategy()


class Telling(lbbsp_core.LastValue):
    """Prints the driving factors that it is told of."""

    def update(self, state, measurement):
        print("DRIVERS", *measurement.drivers, flush=True)
        return super().update(state, measurement)


OPTIONS = {
    "shapes": lambda rank: {
        "predictor": Telling(),
        "drivers": ("memory_percent", "runnable"),
        # Plans by the curves, however short the steps are and whether the plans pay or not.
        "short_step_seconds": 0,
        "policy": lbbsp_core.LoadBalanced(min_gain=0),
        # Nobody's curve is like his peers'; the third is flat up to 24 samples.
        "cost": (
            lbbsp_core.Affine(0.002, 0.001),
            lbbsp_core.Profile([8, 16, 32], [0.01, 0.02, 0.04]),
            lbbsp_core.Saturating(0.024, 0.0, 0.001),
        )[rank],
    },
}
resolver = strategy.cluster_resolver
options = OPTIONS.get(mode, lambda rank: {})(resolver.task_id)
balancer = lbbsp_tf.LoadBalancer(strategy, 48, **options)


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5 and balancer.rank == 1:
            print("FAILING", flush=True)
            if mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "raise":
                raise RuntimeError("the data base is gone")


with strategy.scope():
    convolutions = [keras.layers.Conv2D(16, 3, activation="relu") for _ in range(3)]
    head = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.layers.Input((32, 32, 1)), *convolutions, *head])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
images = np.random.default_rng(0).normal(size=(480, 32, 32, 1)).astype("f4")
labels = (images.mean(axis=(1, 2, 3)) > 0).astype("i4")
if mode == "shapes":  # a fit that draws ahead, and then one that does not
    ahead = balancer.dataset(images, labels, prefetch=1)
    model.fit(ahead, steps_per_epoch=balancer.steps_per_epoch, callbacks=[balancer], verbose=0)
model.fit(
    balancer.dataset(images, labels),
    steps_per_epoch=balancer.steps_per_epoch,
    epochs=4,
    callbacks=[balancer, Fails()],
    verbose=0,
)
