"""Trains on three workers whose curves have different forms: ``training.py FOLDER``."""

import sys

import fits
import keras
import numpy as np
import tensorflow as tf
from virtual_time import VirtualTime

import lbbsp_core
import lbbsp_tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()


class Telling(lbbsp_core.LastValue):
    """Prints the driving factors that it is told of."""

    def update(self, state, measurement):
        print("DRIVERS", *measurement.drivers, flush=True)
        return super().update(state, measurement)


CURVES = (  # nobody's is like his peers'; the third is flat up to 24 samples
    lbbsp_core.Affine(0.002, 0.001),
    lbbsp_core.Profile([8, 16, 32], [0.01, 0.02, 0.04]),
    lbbsp_core.Saturating(0.024, 0.0, 0.001),
)
balancer = lbbsp_tf.LoadBalancer(
    strategy,
    48,
    predictor=Telling(),
    drivers=("memory_percent", "runnable"),
    # Plans by the curves, whether they pay or not.
    short_step_seconds=0,
    policy=lbbsp_core.LoadBalanced(min_gain=0),
    cost=CURVES[strategy.cluster_resolver.task_id],
    record=sys.argv[1],
)
clock = VirtualTime(balancer._session.meter)


class Computes(keras.callbacks.Callback):
    """Lets the seconds pass that a batch takes, of which the first two curves say half."""

    def on_train_batch_begin(self, batch, logs=None):
        steps = zip((2, 2, 1), CURVES, balancer.sizes, strict=True)
        seconds = [times * float(curve(size)) for times, curve, size in steps]
        clock.compute(seconds[balancer.rank], max(seconds))


with strategy.scope():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x = np.random.default_rng(0).normal(size=(480, 8)).astype("f4")
y = (x.mean(axis=1) > 0).astype("i4")
ahead = balancer.dataset(x, y, prefetch=1)
fits.fit(balancer, model, ahead, Computes())
fits.fit(balancer, model, balancer.dataset(x, y), Computes(), epochs=4)  # does not draw ahead
