"""A model with synchronised batch normalisation on three workers with known seconds per sample."""

import time

import keras
import numpy as np
import tensorflow as tf

import lbbsp_tf

SECONDS_PER_SAMPLE = (0.0015, 0.0015, 0.00375)
X, STEPS = 120, 40
L = keras.layers
strategy = tf.distribute.MultiWorkerMirroredStrategy()
balancer = lbbsp_tf.LoadBalancer(strategy, X)


class Computes(keras.callbacks.Callback):
    """Takes the time that a slow device would, without the CPU."""

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(SECONDS_PER_SAMPLE[balancer.rank] * balancer.sizes[balancer.rank])


with strategy.scope():
    blocks = [part for _ in range(3) for part in (L.Dense(8), L.BatchNormalization(), L.ReLU())]
    model = lbbsp_tf.synchronize_batch_norm(keras.Sequential([L.Input((8,)), *blocks, L.Dense(1)]))
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(X * STEPS // 2, 8)).astype("f4")
model.fit(
    balancer.dataset(x, x[:, :1]),
    steps_per_epoch=balancer.steps_per_epoch,
    epochs=2,
    callbacks=[balancer, Computes()],
    verbose=0,
)
