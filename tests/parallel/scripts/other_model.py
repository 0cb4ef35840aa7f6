"""Workers that build different models: what differs is the argument."""

import sys

import keras
import patience  # noqa: F401, before lbbsp
import tensorflow as tf

import lbbsp_tf  # noqa: F401

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
L = keras.layers
different = sys.argv[1]

with strategy.scope():
    layers = [L.Input((4,)), L.Dense(3), L.Dense(2)]
    if different == "layer" and rank:
        layers.append(L.Dense(5))
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1 + rank * (different == "rate")), "mse")
