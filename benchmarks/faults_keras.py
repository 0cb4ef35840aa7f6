"""Trains as one worker of a Keras job into which a fault is injected: ``faults_keras.py FOLDER``.

In FOLDER the job leaves its checkpoints, the samples that each worker has read, and the weights.
A second argument is its variant: "plain", "noise" (dropout, and plans that depend on the step
only), "buckets" (gradients in several buckets, between which a fault may be), or "share=.5" and
"share=auto" (work sharing).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from faults_injected import EPOCHS, EVERY, Injector, ReadSamples, X, limit_seconds

if TYPE_CHECKING:
    import tensorflow as tf


def train(folder: Path, variant: str = "plain") -> None:
    """Trains; the chief saves the weights."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    injector = Injector(folder, rank)
    steps = Steps()

    import keras
    import tensorflow as tf

    import lbbsp_tf
    from lbbsp_core.testing import ChangingPlans

    injector.at("start")
    pack = 4096 if variant == "buckets" else 0
    communication = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=pack)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)
    options = {"policy": ChangingPlans()} if variant == "noise" else {}
    kind, _, share = variant.partition("=")
    if kind == "share":
        options = {"share_work": share if share == "auto" else float(share)}
    balancer = lbbsp_tf.LoadBalancer(
        strategy,
        X,
        checkpoint=folder / "checkpoints",
        every=EVERY,
        limit_seconds=limit_seconds(),
        seed=0,
        **options,
    )
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = keras.layers
        model = keras.Sequential([layers.Input((8,)), layers.Dense(16, "tanh", use_bias=False)])
        if kind != "share":  # which refuses it
            model.add(layers.BatchNormalization(synchronized=True))
        if variant == "noise":
            model.add(layers.Dropout(0.3))
        if variant == "buckets":
            between = lambda: injector.at("bucket", steps.now)  # noqa: E731
            model.add(layers.Dense(64, "tanh"))
            model.add(layers.Lambda(lambda x: _called_backward(x, between)))
            model.add(layers.Dense(64, "tanh"))
        model.add(layers.Dense(1))
        schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 4, 0.9)
        model.compile(keras.optimizers.Adam(schedule), "mse")
    samples = ReadSamples(folder, injector.attempt, rank)

    class Fails(keras.callbacks.Callback):
        """Notes which step begins, and fails after it."""

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            steps.now = self.epoch * balancer.steps_per_epoch + batch
            samples.begin_step(steps.now)

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            injector.at("step", steps.now)

    model.fit(
        balancer.dataset(samples, prefetch=0),
        steps_per_epoch=balancer.steps_per_epoch,
        epochs=EPOCHS,
        callbacks=[balancer, Fails()],
        verbose=0,
    )
    injector.at("end")
    if rank == 0:
        np.savez(folder / "weights.npz", *model.get_weights())


class Steps:
    """The running step."""

    now = -1


def _called_backward(x: tf.Tensor, function: Callable[[], None]) -> tf.Tensor:
    """Returns `x`; the backward pass calls a function when it arrives here."""
    import tensorflow as tf

    def call(gradient: tf.Tensor) -> tf.Tensor:
        function()
        return gradient

    @tf.custom_gradient
    def same(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def backward(upstream: tf.Tensor) -> tf.Tensor:
            called = tf.py_function(call, [upstream], upstream.dtype)
            called.set_shape(upstream.shape)
            return called

        return tf.identity(x), backward

    return same(x)


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:])
