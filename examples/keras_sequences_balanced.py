"""Trains on sequences of different lengths: each worker gets its share of the tokens of a step.

A digit is a sequence of points that are drawn at random where it has ink; long and short ones
differ by far more than workers do. Run it on any TF_CONFIG cluster, or on this machine:
lbbsp launch -n 3 examples/keras_sequences_balanced.py
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import lbbsp_tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
balancer = lbbsp_tf.LoadBalancer(strategy, global_batch_size=96)
images, labels = load_digits(return_X_y=True)
rng = np.random.default_rng(0)
lengths = rng.lognormal(np.log(60), 0.8, len(images)).astype(int).clip(8, 400)
ink = images / images.sum(axis=1, keepdims=True)
points = [1 + rng.choice(64, n, p=each) for n, each in zip(lengths, ink, strict=True)]
tokens = tf.ragged.constant(points)


class Reader(keras.Model):
    """Reads the tokens of all sequences side by side; padding (0) costs nothing."""

    def __init__(self):
        super().__init__()
        self.of_tokens = keras.Sequential(
            [
                keras.layers.Embedding(65, 64),
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(256, activation="relu"),
            ]
        )
        self.of_sequences = keras.layers.Dense(10)

    def call(self, tokens):
        """Returns the logits of sequences, shape (sequences, 10)."""
        places = tf.where(tokens > 0)
        read = self.of_tokens(tf.gather_nd(tokens, places))
        means = tf.math.unsorted_segment_mean(read, places[:, 0], tf.shape(tokens)[0])
        return self.of_sequences(means)


with strategy.scope():
    keras.utils.set_random_seed(0)
    model = Reader()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

model.fit(
    balancer.dataset(tokens[:1536], labels[:1536], seed=0, padded=True, work=lengths[:1536]),
    callbacks=[balancer],
    epochs=6,
    validation_data=(tokens[1536:].to_tensor(), labels[1536:]),
    verbose=2 if strategy.cluster_resolver.task_id == 0 else 0,
)
