"""Trains as one worker of a Keras job into which a fault is injected: ``faults_keras.py FOLDER``.

In FOLDER the job leaves its checkpoints, the samples that each worker has read, and the weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from faults_injected import EPOCHS, EVERY, Injector, ReadSamples, X, limit_seconds


def train(folder: Path) -> None:
    """Trains; the chief saves the weights."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    injector = Injector(rank)

    import keras
    import tensorflow as tf

    import lbbsp_tf

    injector.at("start")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    balancer = lbbsp_tf.LoadBalancer(
        strategy,
        X,
        checkpoint=folder / "checkpoints",
        every=EVERY,
        limit_seconds=limit_seconds(),
        seed=0,
    )
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential([layers.Input((8,)), layers.Dense(16, "tanh", use_bias=False)])
        model.add(layers.BatchNormalization(synchronized=True))
        model.add(layers.Dense(1))
        schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 4, 0.9)
        model.compile(keras.optimizers.Adam(schedule), "mse")
    samples = ReadSamples(folder, injector.attempt, rank)

    class Steps(keras.callbacks.Callback):
        """Notes which step begins, and fails in it."""

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            self.step = self.epoch * balancer.steps_per_epoch + batch
            samples.begin_step(self.step)

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            injector.at("step", self.step)

    model.fit(
        balancer.dataset(samples, prefetch=0),
        steps_per_epoch=balancer.steps_per_epoch,
        epochs=EPOCHS,
        callbacks=[balancer, Steps()],
        verbose=0,
    )
    injector.at("end")
    if rank == 0:
        np.savez(folder / "weights.npz", *model.get_weights())


if __name__ == "__main__":
    train(Path(sys.argv[1]))
