"""Trains a network whose backward pass waits below its top layer: ``overlap.py FOLDER BYTES``.

It waits for the sums of the top layer, and would never end if these were sent only afterwards; not
where all gradients are in one bucket.
"""

import sys
import threading

import keras
import numpy as np
import tensorflow as tf
from report import result

import lbbsp_tf
from lbbsp_core import read_run
from lbbsp_tf.compat import replaced

ALL = 1 << 40  # bytes of a bucket that holds all gradients
strategy = tf.distribute.MultiWorkerMirroredStrategy()
options = strategy.extended._communication_options  # those that a script passes to the strategy
arrived = threading.Event()


@keras.saving.register_keras_serializable()
class Waits(keras.layers.Layer):
    def call(self, x):
        @tf.custom_gradient
        def waiting(x):
            def wait(upstream):
                arrived.wait()
                return upstream

            return x, lambda upstream: tf.ensure_shape(
                tf.numpy_function(wait, [upstream], upstream.dtype), upstream.shape
            )

        return waiting(x)


def watch(overlap):
    """Lets each step from the second one on wait for its own sums."""
    end, leave = overlap.end, overlap.leave
    overlap.end = lambda: (end(), arrived.set())
    overlap.leave = lambda: (leave(), arrived.clear())


with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(8), Waits(), keras.layers.Dense(8)]
    )
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(320, 8)).astype("f4")
for size in map(int, sys.argv[2:]):
    folder = f"{sys.argv[1]}/{size}"
    balancer = lbbsp_tf.LoadBalancer(strategy, 32, policy="bsp", record=folder, weight_by="samples")
    arrived.set()
    if size != ALL:
        watch(balancer._session.meter.overlap)
    with replaced(options, "bytes_per_pack", size):
        model.fit(
            balancer.dataset(x, x),
            steps_per_epoch=balancer.steps_per_epoch,
            callbacks=[balancer],
            verbose=0,
        )
    if balancer.rank == 0:
        result(folder, [line.hidden_seconds for line in read_run(folder).steps[1:]])
