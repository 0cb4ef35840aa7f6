"""Steps that share work: which cannot, and what happens to one whose claims are not answered."""

import os
import signal
import subprocess
import sys

import fits
import keras
import numpy as np
import tensorflow as tf
from comparison import SAMPLES, Trained, compare
from report import answer_all, largest_difference, result

import lbbsp_tf
from lbbsp_core.runtime.extensions import work_sharing
from lbbsp_tf import service
from lbbsp_tf.compat import replaced
from lbbsp_tf.exchange.claims import Counters

L = keras.layers
X = 16
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 4)).astype("f4")
LABELS = rng.integers(0, 3, SAMPLES)
x, y = FEATURES[: 20 * X], LABELS[: 20 * X]
strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Averaged(keras.Model):
    """Keeps a running mean of its weights, besides what the optimizer applies."""

    def build(self, shape):
        super().build(shape)
        self.mean = self.add_weight(shape=(4, 3), trainable=False, name="mean")

    def train_step(self, data):
        logs = super().train_step(data)
        self.mean.assign(0.9 * self.mean + 0.1 * self.layers[-1].kernel)
        return logs


class Twice(keras.Model):
    """Applies two gradients in a step."""

    def train_step(self, data):
        for _ in range(2):
            logs = super().train_step(data)
        return logs


class MeanOfWorkers(keras.Model):
    """Asks all workers before it applies gradients."""

    def train_step(self, data):
        mean = tf.distribute.get_replica_context().all_reduce("MEAN", data[0])
        return super().train_step((data[0] + 0.0 * mean[:1], data[1]))


class Shifted(keras.Model):
    """Draws noise that no sample has."""

    def train_step(self, data):
        return super().train_step((data[0] + keras.random.normal(()), data[1]))


class LargestMargin(keras.metrics.Metric):
    """Written by hand: all workers give it the samples of all."""

    def __init__(self):
        super().__init__()
        self.largest = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y_pred)))

    def result(self):
        return self.largest.value


def model(*layers, kind=keras.Sequential, metrics=None, run_eagerly=False):
    with strategy.scope():
        if kind is keras.Sequential:
            built = kind([L.Input((4,)), *layers, L.Dense(3)])
        else:
            inputs = L.Input((4,))
            built = kind(inputs, L.Dense(3)(inputs))
        built.compile("sgd", LOSS, metrics=metrics and metrics(), run_eagerly=run_eagerly)
    return built


def plain(distributed):
    built = keras.Sequential([L.Input((4,)), L.Dense(3)])
    built.compile(keras.optimizers.SGD(0.1), LOSS)
    return built


def fit(built, data=lambda balancer: balancer.dataset(x, y), **options):
    balancer = lbbsp_tf.LoadBalancer(strategy, X, **{"share_work": True, **options})
    fits.fit(balancer, built, data(balancer))


def by_loop():
    balancer = lbbsp_tf.LoadBalancer(strategy, X, share_work=True)
    with balancer.loop(model().train_step, balancer.dataset(x, y)) as loop:
        for _ in loop.epoch():
            pass


def records(balancer):
    return balancer.dataset(tf.data.Dataset.from_tensor_slices((x, y)))


CASES = {
    "synchronized_batch_norm": lambda: fit(model(L.BatchNormalization(synchronized=True))),
    "batch_norm": lambda: fit(model(L.BatchNormalization()), weight_by="samples"),
    "frozen_batch_norm": lambda: fit(model(L.BatchNormalization(trainable=False))),
    "metric_by_hand": lambda: fit(model(metrics=lambda: [LargestMargin()])),
    "averaged_weights": lambda: fit(model(kind=Averaged)),
    "mean_of_workers": lambda: fit(model(kind=MeanOfWorkers), weight_by="samples"),
    "two_applies": lambda: fit(model(kind=Twice)),
    "shifted": lambda: fit(model(kind=Shifted)),
    "run_eagerly": lambda: fit(model(run_eagerly=True)),
    "work": lambda: fit(model(), lambda it: it.dataset(x, y, work=np.ones(len(x)))),
    "tf_data": lambda: fit(model(), records),
    "weight_by_sum": lambda: fit(model(), weight_by="sum"),
    "loop": by_loop,
    "no_fraction": lambda: fit(model(), share_work=0.9),
    "dropout": lambda: fit(model(L.Dropout(0.5)), share_work=0.4),
    "kept_outside": lambda: fit(keeping(outside=True)),
}


class Code(L.Layer):
    """Keeps tensors of its last call, in several ways."""

    def __init__(self):
        super().__init__()
        self.found, self.history = {}, []

    def call(self, inputs):
        self.energy = tf.reduce_mean(tf.square(inputs))
        self.add_loss(0.1 * self.energy)
        self.found["energy"] = 2.0 * self.energy
        self.history.append(3.0 * self.energy)
        return inputs


KEPT = {}


class Keeping(keras.Model):
    """Reads after `apply` what its layers have kept, and multiplies losses by a number."""

    factor, keeps_outside = 1.0, False

    def train_step(self, data):
        features, labels = data
        with tf.GradientTape() as tape:
            logits = self(features, training=True)
            loss = self.factor * LOSS(labels, logits)
            total = loss + sum(self.losses)
        code = self.layers[2]
        KEPT["energy"] = code.energy
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
        kept = [code.energy, code.found["energy"], code.history[-1], *self.losses]
        if self.keeps_outside:
            kept.append(KEPT["energy"])
        return {"loss": loss, "kept": sum(kept)}


class Changing(keras.callbacks.Callback):
    """Changes values of Python that the traced step has read already."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.factor = 3.0
        self.model.layers[1].trainable = False


def keeping(outside=False):
    with strategy.scope():
        inputs = L.Input((4,))
        built = Keeping(inputs, L.Dense(3)(Code()(L.Dense(8, "tanh")(inputs))))
        built.compile(keras.optimizers.SGD(0.1))
    built.keeps_outside = outside
    return built


def train_alike():
    """Trains with and without sharing; a callback changes what the step has read already."""
    weights = []
    for share_work in (False, 0.4):
        keras.utils.set_random_seed(0)
        built = keeping()
        balancer = lbbsp_tf.LoadBalancer(strategy, X, share_work=share_work)
        lines = []
        balancer._session.observers.append(lines.append)
        fits.fit(balancer, built, balancer.dataset(x, y), Changing())
        weights.append(built.get_weights())
    result("alike", {
        "difference": largest_difference(*weights),
        "shared": sum("parts" in line.values for line in lines),
    })  # fmt: skip


def doubled(features, label):
    if features[0] > 0:  # converted to tf.cond
        features = 2 * features
    return features, label


def fit_again():
    """Fits a model twice, on other data the second time, with and without sharing."""
    weights = []
    for share_work in (False, 0.4):
        keras.utils.set_random_seed(0)
        built = model(L.Dense(8, "tanh"))
        balancer = lbbsp_tf.LoadBalancer(strategy, X, share_work=share_work)
        lines = []
        balancer._session.observers.append(lines.append)
        for sign in (1, -1):
            fits.fit(balancer, built, balancer.dataset(sign * x, y, map=doubled))
        weights.append(built.get_weights())
    result("again", {
        "difference": largest_difference(*weights),
        "samples": [sum(line.sizes) for line in lines],
        "shared": ["parts" in line.values for line in lines],
    })  # fmt: skip


def stop_the_chief():
    """Stops worker 0 for a moment when the other one claims a part, which is late then."""
    add, shared, stopped, chief = Counters.add, [], [], pid_of_chief()
    resuming = []

    def added(counters, key, number):
        step = int(key.rsplit("/", 1)[1])
        shared.append(step)
        if rank == 1 and step >= 6 and not stopped:
            stopped.append(step)
            work_sharing.SLOW_CLAIM_SECONDS = 0.0
            os.kill(chief, signal.SIGSTOP)
            again = f"import os; os.kill({chief}, {signal.SIGCONT})"
            resuming.append(subprocess.Popen([sys.executable, "-c", again]))
        return add(counters, key, number)

    balancer = {"share_work": 0.5, "weight_by": "samples"}
    with replaced(Counters, "add", added):
        compare("stopped", strategy, Trained(plain, FEATURES, LABELS, balancer=balancer))
    for process in resuming:
        process.wait()
    result("last_shared_step", max(shared))
    result("stopped_at", stopped)


def pid_of_chief():
    if rank == 0:
        service.write("sharing-test/pid", str(os.getpid()))
    return int(service.wait_for("sharing-test/pid", 300_000))


if __name__ == "__main__":
    # No claim is late, however long it takes, but that of a worker that is stopped.
    with replaced(work_sharing, "SLOW_CLAIM_SECONDS", np.inf):
        answer_all(CASES)
        train_alike()
        fit_again()
        stop_the_chief()
