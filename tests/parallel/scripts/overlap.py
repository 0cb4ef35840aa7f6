"""Trains a network whose backward pass rests below its top layer: ``overlap.py FOLDER BYTES``."""

import sys
import time

import keras
import numpy as np
import tensorflow as tf
from leads import Leads
from report import result

import lbbsp_tf
from lbbsp_core import read_run
from lbbsp_tf.compat import replaced

RESTS = 0.1  # seconds
strategy = tf.distribute.MultiWorkerMirroredStrategy()
options = strategy.extended._communication_options  # those that a script passes to the strategy


@keras.saving.register_keras_serializable()
class Rests(keras.layers.Layer):
    def call(self, x):
        @tf.custom_gradient
        def resting(x):
            def rest(upstream):
                time.sleep(RESTS)
                return upstream

            return x, lambda upstream: tf.ensure_shape(
                tf.numpy_function(rest, [upstream], upstream.dtype), upstream.shape
            )

        return resting(x)


with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(8), Rests(), keras.layers.Dense(8)]
    )
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(320, 8)).astype("f4")
for size in map(int, sys.argv[2:]):
    folder = f"{sys.argv[1]}/{size}"
    balancer = lbbsp_tf.LoadBalancer(strategy, 32, policy="bsp", record=folder)
    leads = Leads(balancer._session.meter)
    with replaced(options, "bytes_per_pack", size):
        model.fit(
            balancer.dataset(x, x),
            steps_per_epoch=balancer.steps_per_epoch,
            callbacks=[balancer],
            verbose=0,
        )
    if balancer.rank == 0:
        hidden = [line.hidden_seconds for line in read_run(folder).last_half()]
        result(folder, {"hidden": hidden, "sent": leads.sent[2:], "summed": leads.summed[2:]})
