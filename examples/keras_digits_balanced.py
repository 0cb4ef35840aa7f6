"""Trains on handwritten digits with Keras: faster workers get larger batches.

Run it on any TF_CONFIG cluster, or on this machine with three unequal workers:
lbbsp launch -n 3 --speeds 1,1,0.4 examples/keras_digits_balanced.py
"""

import time

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import lbbsp_tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
balancer = lbbsp_tf.LoadBalancer(strategy, global_batch_size=192)
images, labels = load_digits(return_X_y=True)
images = np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))).astype("float32")[..., None] / 16

with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((24, 24, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(4),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.Adam(2e-3)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

started = time.perf_counter()
model.fit(
    balancer.dataset(images[:1536], labels[:1536], seed=0),
    callbacks=[balancer],
    epochs=8,
    validation_data=(images[1536:], labels[1536:]),
    verbose=2 if strategy.cluster_resolver.task_id == 0 else 0,
)
print(f"{time.perf_counter() - started:.1f} seconds")
