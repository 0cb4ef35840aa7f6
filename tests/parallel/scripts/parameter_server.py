"""ASP through parameter servers, as the chief: ``parameter_server.py MODE``."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import psutil
import tensorflow as tf
from report import largest_difference, result

import lbbsp_tf
from lbbsp_core import GlobalOrder
from lbbsp_tf import parameter_server

SAMPLES, BATCH = 83, 8  # an epoch ends with a batch of 3


def together():
    """What a job of several workers is asked: most of the tests, as starting one takes long."""
    strategy = lbbsp_tf.parameter_server_strategy()
    misuse(strategy)
    count_samples(strategy)
    count_pushes(strategy)
    learn_digits(strategy)


def count_samples(strategy):
    """Each use of a sample takes exactly 1 from a weight of its own, whoever uses it and when."""
    with strategy.scope():
        once = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        counting = keras.Sequential([once])
        loss = keras.losses.MeanAbsoluteError(reduction="sum")  # far below: the slope is 1
        counting.compile(keras.optimizers.SGD(1.0), loss)
    x, y = np.eye(SAMPLES, dtype="f4"), np.full((SAMPLES, 1), -1e3, "f4")
    for epochs in (3, 1):
        lbbsp_tf.fit_asynchronously(counting, x, y, batch_size=BATCH, epochs=epochs)
    result("uses", (-counting.get_weights()[0][:, 0]).tolist())
    result("iterations", int(counting.optimizer.iterations))


def count_pushes(strategy):
    """Each push takes 1 from the only weight: an iteration's loss tells how many it has seen."""

    class Slow(keras.optimizers.SGD):
        """Gives others the time to begin between the gradient and the change of the weight."""

        def update_step(self, gradient, variable, learning_rate):
            work = tf.random.normal((256, 256))
            for _ in range(20):
                work = tf.tanh(work @ work)
            super().update_step(gradient + 1e-30 * tf.reduce_sum(work), variable, learning_rate)

    log_epoch = parameter_server._log_epoch

    def noting(log, pushes, began):
        found.extend(
            (each.line.push, each.line.staleness, 1e3 - each.loss / BATCH) for each in pushes
        )
        return log_epoch(log, pushes, began)

    found, x, y = [], np.ones((BATCH, 1), "f4"), np.full((BATCH, 1), -1e3, "f4")
    parameter_server._log_epoch = noting
    with strategy.scope():
        once = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        counting = keras.Sequential([once])
        loss = keras.losses.MeanAbsoluteError(reduction="sum")
        counting.compile(Slow(1 / BATCH), loss)
    lbbsp_tf.fit_asynchronously(counting, x, y, batch_size=BATCH, epochs=30)
    parameter_server._log_epoch = log_epoch
    result("seen", found)


def learn_digits(strategy):
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("f4")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        image = [keras.layers.Reshape((8, 8, 1)), keras.layers.UpSampling2D(4)]
        convolutions = [keras.layers.Conv2D(16, 3, activation="relu") for _ in range(2)]
        head = [keras.layers.AveragePooling2D(4), keras.layers.Flatten(), keras.layers.Dense(10)]
        inputs = keras.layers.Input((64,))
        model = keras.Sequential([inputs, *image, *convolutions, *head])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
    history = lbbsp_tf.fit_asynchronously(
        model, x[:1500], y[:1500], batch_size=32, epochs=4, record=os.environ["LBBSP_RUN_DIR"]
    )
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile(metrics=["accuracy"])
    result("accuracy", copy.evaluate(x[1500:], y[1500:], verbose=0)[1])
    result("loss", history["loss"])


def misuse(strategy):
    x, y = np.zeros((SAMPLES, 4), "f4"), np.zeros(SAMPLES, "i4")

    def fit(model, targets=y, batch_size=BATCH, **options):
        lbbsp_tf.fit_asynchronously(model, x, targets, batch_size=batch_size, **options)

    def model(optimizer="sgd", compiled=True, scoped=True):
        built = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        if compiled:
            built.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return built

    class Lossless(keras.Sequential):
        def train_step(self, data):
            return {}

    outside = model()
    with strategy.scope():
        right, raw = model(), model(compiled=False)
        accumulating = model(keras.optimizers.SGD(gradient_accumulation_steps=2))
        lossless = Lossless([keras.layers.Input((4,)), keras.layers.Dense(2)])
        lossless.compile("sgd")
    cases = {
        "outside_scope": lambda: fit(outside),
        "not_compiled": lambda: fit(raw),
        "accumulation": lambda: fit(accumulating),
        "no_loss": lambda: fit(lossless),
        "epochs": lambda: fit(right, epochs=0),
        "batch_size": lambda: fit(right, batch_size=0),
        "small_data": lambda: fit(right, batch_size=SAMPLES + 1),
        "lengths": lambda: fit(right, y[:9]),
        "labels": lambda: fit(right, y + 7),  # found out by the workers
    }
    for name, case in cases.items():
        result(name, answer(case))


def answer(case):
    try:
        case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def alone():
    """One worker: what plain Keras learns from the same batches, in the same order."""
    strategy = lbbsp_tf.parameter_server_strategy()
    random = np.random.default_rng(0)
    x = {name: random.normal(size=(SAMPLES, 3)).astype("f4") for name in ("left", "right")}
    y, weight = random.normal(size=(SAMPLES, 2)).astype("f4"), random.random(SAMPLES).astype("f4")

    def build():
        keras.utils.set_random_seed(3)
        inputs = {name: keras.layers.Input((3,), name=name) for name in x}
        hidden = keras.layers.Concatenate()(list(inputs.values()))
        hidden = keras.layers.Dense(5, "tanh", kernel_regularizer="l2")(hidden)
        hidden = keras.layers.BatchNormalization()(hidden)
        model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
        decay = keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.5)
        model.compile(keras.optimizers.Adam(decay, clipnorm=1.0), "mse")
        return model

    with strategy.scope():
        served = build()
    history = lbbsp_tf.fit_asynchronously(served, x, y, weight, batch_size=BATCH, epochs=3, seed=5)
    plain, order, losses = build(), GlobalOrder(SAMPLES, BATCH, seed=5), []
    for step in range(3 * order.steps_per_epoch):
        k = order.indices(step)
        plain.reset_metrics()
        batch = {name: values[k] for name, values in x.items()}
        losses.append(plain.train_on_batch(batch, y[k], sample_weight=weight[k]) * len(k))
    result("difference", largest_difference(served, plain))
    result("moved", largest_difference(served, build()))
    expected = np.reshape(losses, (3, -1)).sum(1) / SAMPLES
    result("loss_difference", np.abs(expected - history["loss"]).max())


def kill(kind):
    """Trains on and on, until the last worker or server is killed."""

    def strike():
        record = Path(os.environ["LBBSP_RUN_DIR"]) / "run.jsonl"
        while not (record.exists() and len(record.read_text().splitlines()) > 20):
            time.sleep(0.05)
        peers = psutil.Process().parent().children()
        (*_, victim) = [p for p in peers if f'"type": "{kind}"' in p.environ().get("TF_CONFIG", "")]
        print(f"FAILING {time.time()}", flush=True)
        os.kill(victim.pid, signal.SIGKILL)

    strategy = lbbsp_tf.parameter_server_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    threading.Thread(target=strike, daemon=True).start()
    x, y = np.zeros((SAMPLES, 4), "f4"), np.zeros((SAMPLES, 2), "f4")
    lbbsp_tf.fit_asynchronously(model, x, y, batch_size=BATCH, epochs=100_000)


mode, *arguments = sys.argv[1:]
globals()[mode](*arguments)
