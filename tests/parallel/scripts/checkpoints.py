"""Trainings that are interrupted and continued from a checkpoint, against unbroken ones.

Usage: checkpoints.py single|mirrored|workers FOLDER CASE...
"""

import contextlib
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from comparison import PLANS, X
from fits import two_devices
from report import largest_difference, result

import lbbsp_tf
from lbbsp_core.runtime.record.figures import Figures
from lbbsp_core.testing import ChangingPlans
from lbbsp_tf.reliability.checkpoints import _owners

L = keras.layers
SAMPLES = 10 * X + 21  # a short last batch in every epoch
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 10)).astype("f4")
TARGETS = rng.normal(size=(SAMPLES, 1)).astype("f4")
STEPS = 11  # of an epoch


class InterruptedFitError(Exception):
    """Stands for the end of the process."""


FIGURES = {*Figures._fields}
"""Logs that depend on the speed of the machine, and differ between two runs."""


class Watch(keras.callbacks.Callback):
    """Counts steps and epochs, and raises an error after a step."""

    def __init__(self, until=None, balancer=None):
        super().__init__()
        self.until, self.balancer, self.batches, self.epochs = until, balancer, [], []
        self.figures = []

    def on_train_batch_end(self, batch, logs=None):
        if self.balancer and self.balancer._checkpoints:  # no write is skipped
            self.balancer._checkpoints.schedule.flush()
        self.batches.append(batch)
        if len(self.batches) == self.until:
            raise InterruptedFitError

    def on_epoch_end(self, epoch, logs=None):
        rest = {name: float(value) for name, value in logs.items() if name not in FIGURES}
        self.epochs.append((epoch, rest))
        self.figures.append(set(logs) >= FIGURES)


def dense():
    inputs = L.Input((10,))
    hidden = L.Dense(16, activation="tanh", kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, L.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def noisy():
    """Dropout, synchronised batch normalisation, Adam and averaged weights."""
    model = keras.Sequential(
        [L.Input((10,)), L.Dense(16), L.BatchNormalization(synchronized=True), L.Dropout(0.3),
         L.Dense(1)]
    )  # fmt: skip
    optimizer = keras.optimizers.Adam(0.01, use_ema=True)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def scaled():
    """Mixed precision, with a loss scale that grows until gradients overflow.

    The inner optimizer adds up the gradients of two steps, and has a learning rate that decays.
    """
    hidden = L.Dense(16, activation="tanh", dtype="mixed_float16")
    model = keras.Sequential([L.Input((10,)), hidden, L.Dense(1, dtype="float32")])
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.9)
    inner = keras.optimizers.Adam(rate, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=2.0**13, dynamic_growth_steps=3
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


class TwoOptimizers(keras.Model):
    """Own train step with an optimizer that is built when it is traced, and noise of `keras`."""

    def __init__(self):
        super().__init__()
        self.first, self.last = L.Dense(8, activation="relu"), L.Dense(1)

    def build(self, shape):
        self.first.build(shape)
        self.last.build((None, 8))

    def call(self, x):
        return self.last(self.first(x))

    def compile(self, **options):
        super().compile(**options)
        self.other = keras.optimizers.Adam(0.01)
        self.error = keras.metrics.Mean("error")

    def train_step(self, data):
        x, y = data
        x = x + keras.random.normal(keras.ops.shape(x), stddev=0.1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        first, last = self.first.trainable_variables, self.last.trainable_variables
        grads = tape.gradient(loss, [*first, *last])
        self.optimizer.apply(grads[: len(first)], first)
        self.other.apply(grads[len(first) :], last)
        self.error.update_state(loss)
        return {"error": self.error.result()}


def two_optimizers():
    model = TwoOptimizers()
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9))
    return model


class Batches(keras.utils.PyDataset):
    """Global batches."""

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        place = slice(index * X, index * X + X)
        return FEATURES[place], TARGETS[place]


def stream():
    data = tf.data.Dataset.from_tensor_slices((FEATURES, TARGETS))
    return data.shuffle(200, seed=3, reshuffle_each_iteration=False).batch(48)


def callbacks():
    return [
        keras.callbacks.ReduceLROnPlateau("loss", patience=2, min_delta=10.0),
        keras.callbacks.EarlyStopping("loss", patience=4, min_delta=10.0, start_from_epoch=1),
    ]


ARRAYS = lambda: (FEATURES, TARGETS)  # noqa: E731
CASES = {
    # name: model, data, options of dataset, options of fit, every, steps until interruptions
    "steps": (dense, ARRAYS, {}, {}, 3, (8, 7)),
    "epochs": (dense, ARRAYS, {}, {}, "epoch", (15,)),
    "each_step": (dense, ARRAYS, {}, {}, 1, (STEPS, 1, STEPS)),
    "noise": (noisy, ARRAYS, {}, {}, 4, (9, 10)),
    "scaled": (scaled, ARRAYS, {}, {}, 8, (26,)),
    "own_step": (two_optimizers, ARRAYS, {}, {}, 5, (8,)),
    "prefetch": (dense, ARRAYS, {"prefetch": 2}, {}, 4, (18,)),
    "map": (dense, ARRAYS, {"map": lambda x, y: (2 * x, y)}, {}, 4, (6,)),
    "stream": (dense, lambda: (stream(),), {}, {}, 4, (18,)),
    "sequence": (dense, lambda: (Batches(),), {}, {}, 4, (18,)),
    "steps_per_epoch": (dense, ARRAYS, {"steps_per_epoch": 7}, {}, 3, (9,)),
    "class_weight": (dense, lambda: (FEATURES, (TARGETS > 0).astype("i4")[:, 0]), {},
                     {"class_weight": {0: 1.0, 1: 3.0}}, 4, (6,)),
    "validation": (dense, ARRAYS, {}, {"validation_data": (FEATURES[:90], TARGETS[:90])}, 4, (6,)),
    "callbacks": (dense, ARRAYS, {}, {"epochs": 8, "callbacks": callbacks}, 4, (29, 14)),
}  # fmt: skip


def build(make):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        return make()


def start(folder, every, **options):
    if strategy.num_replicas_in_sync > 1:
        options = {"policy": ChangingPlans(PLANS[strategy.num_replicas_in_sync]), **options}
    checkpoint = {"checkpoint": folder, "every": every} if folder else {}
    _owners.clear()  # it is that of a new process
    return lbbsp_tf.LoadBalancer(strategy, X, **checkpoint, **options)


def train(case, folder, until=None):
    """Trains as a new process would do, until it is interrupted after some of its steps."""
    make, data, of_data, options, every, _ = case
    weight_by = "auto" if make is two_optimizers else "samples"  # a proof takes a third of a fit
    balancer, model = start(folder, every, weight_by=weight_by), build(make)
    watch = Watch(until, balancer)
    others = options.get("callbacks", list)()
    options = {"epochs": 3, "verbose": 0, **options, "callbacks": [*others, watch, balancer]}
    given = balancer.dataset(*data(), **of_data)
    with contextlib.suppress(InterruptedFitError):
        model.fit(given, steps_per_epoch=balancer.steps_per_epoch, **options)
    return model, watch, balancer


def compare(name):
    """Compares an interrupted training with an unbroken one."""
    case = CASES[name]
    whole, expected, first = train(case, None)
    folder = shared / name
    for until in case[-1]:
        train(case, folder, until)
    model, watch, _ = train(case, folder)
    again, rest, last = train(case, folder)
    start_weights = build(case[0])
    logs = [abs(new - old) for (epoch, mine) in watch.epochs
            for (other, theirs) in expected.epochs if epoch == other
            for new, old in zip(mine.values(), theirs.values(), strict=True)]  # fmt: skip
    result(name, {
        "difference": largest_difference(whole, model),
        "moved": largest_difference(whole, start_weights) if start_weights.weights else 1.0,
        "logs": max(logs),
        "names": [sorted(logs) for _, logs in watch.epochs[:1] + expected.epochs[:1]],
        "epochs": [epoch for epoch, _ in watch.epochs],
        "figures": watch.figures,
        "history": sorted(FIGURES & set(model.history.history)),
        "last_epoch": expected.epochs[-1][0],
        "batches": watch.batches[:3],
        "steps": [last._session.step, first._session.step],
        "again": largest_difference(whole, again),
        "again_steps": len(rest.batches),
    })  # fmt: skip


if __name__ == "__main__":
    kind, folder, *names = sys.argv[1:]
    shared = Path(folder)
    if kind == "workers":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:  # other scripts of this process need two devices
        mirrored = two_devices()
        strategy = mirrored if kind == "mirrored" else tf.distribute.get_strategy()
    for name in names or CASES:
        compare(name)
