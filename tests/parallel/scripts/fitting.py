"""One cluster, many fits: what callbacks, repetition and evaluation do to it."""

import contextlib
import io
import logging
import sys
from pathlib import Path

import fits
import keras
import numpy as np
import tensorflow as tf
from report import result
from virtual_time import Unequal

import lbbsp_tf
from lbbsp_core.runtime.record.figures import Figures

X, SAMPLES = 32, 32 * 6
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 4)).astype("f4")
LABELS = (FEATURES.sum(axis=1) > 0).astype("i4")
strategy = tf.distribute.MultiWorkerMirroredStrategy()
shared = Path(sys.argv[1])


def model(loss="sparse_categorical_crossentropy"):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        built = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, "softmax")])
        built.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return built


class Seen(keras.callbacks.Callback):
    """Counts steps, and does something at one of them."""

    def __init__(self, at=None, act=None):
        super().__init__()
        self.steps, self.at, self.act = 0, at, act

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.at:
            self.act(self.model)


def stop(model):
    model.stop_training = True


def fit(balancer, built, *callbacks, x=FEATURES, **options):
    data = balancer.dataset(x, LABELS, seed=3)
    return fits.fit(balancer, built, data, *callbacks, **{"epochs": 2} | options)


def balancer(**options):
    return lbbsp_tf.LoadBalancer(strategy, X, weight_by="samples", **options)


# One worker alone wishes to stop in the middle of an epoch: all stop at the same step.
it = balancer()
seen = Seen(3, stop if it.rank == 1 else lambda model: None)
fit(it, model(), seen, epochs=5)
result("stop_on_one_worker", seen.steps)


# One worker alone wishes to stop at the end of an epoch: all do, and no step is added.
class StopsAfterFirstEpoch(Seen):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = it.rank == 2


it = balancer()
seen = StopsAfterFirstEpoch()
fit(it, model(), seen, epochs=5)
result("stop_at_epoch_end_on_one_worker", seen.steps)

# A NaN that one worker alone draws ends the run on all of them.
poisoned = FEATURES.copy()
poisoned[it._input.order.indices(2)[0]] = np.nan
it, seen = balancer(), Seen()
fit(it, model(), keras.callbacks.TerminateOnNaN(), seen, x=poisoned, epochs=3)
result("terminate_on_nan", seen.steps)

# Callbacks that look at the logs see the same ones everywhere; checkpoints are written once.
it, built, seen = balancer(), model(), Seen()
stopping = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)
plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=0, min_delta=10.0)
saving = keras.callbacks.ModelCheckpoint(shared / "best.keras", monitor="val_loss")
history = fit(it, built, stopping, plateau, saving, seen, epochs=6,
              validation_data=(FEATURES[:50], LABELS[:50])).history  # fmt: skip
rate = float(keras.ops.convert_to_numpy(built.optimizer.learning_rate))
result("early_stopping", {"steps": seen.steps, "rate": rate})
result("logs", history["loss"] + history["val_loss"] + history["val_accuracy"])
alone = keras.models.load_model(shared / "best.keras") if it.rank == 0 else None
if alone is not None:
    values = alone.evaluate(FEATURES[:50], LABELS[:50], verbose=0)
    result("checkpoint", [*values, history["val_loss"][-1], history["val_accuracy"][-1]])

# Repeated fits continue where the last one ended; each sample comes once an epoch.
drawn: list[int] = []


def spy(x, y):
    tf.numpy_function(lambda i: drawn.append(int(i)), [x[0]], [])
    return x, y


numbered = np.repeat(np.arange(SAMPLES, dtype="f4")[:, None], 4, axis=1)
it, built = balancer(), model()
data = it.dataset(numbered, LABELS, map=spy, prefetch=0)
fits.fit(it, built, data, epochs=1)
drawn.clear()  # the proof of the weighting reads samples too, before the first step
fits.fit(it, built, data, epochs=2, initial_epoch=1)
fits.fit(it, built, data, epochs=4, initial_epoch=2)
result("drawn", drawn)
result("steps_in_all", it._session.step)

# Two data sets in turn: each is drawn in its own order.
it, built = balancer(), model()
half = it.dataset(numbered[: 3 * X], LABELS[: 3 * X], map=spy, prefetch=0)
fits.fit(it, built, half, steps_per_epoch=3)
whole = it.dataset(numbered, LABELS, map=spy, prefetch=0)
drawn.clear()
fits.fit(it, built, half, steps_per_epoch=3)
result("drawn_of_the_first_of_two", drawn)
drawn.clear()
fits.fit(it, built, whole, steps_per_epoch=SAMPLES // X)
result("drawn_of_the_second_of_two", drawn)


# A fit that failed on all workers leaves nothing behind: the next one may have other data.
def fail(model):
    raise RuntimeError("the disk is full")


it, built, seen = balancer(), model(), Seen()
try:
    fit(it, built, Seen(2, fail))
except RuntimeError:
    fit(it, built, seen, x=FEATURES[::-1].copy(), epochs=1)
result("after_a_failed_fit", seen.steps)


# Workers 1 and 2 are slow: worker 0 gets twice an even share, and is said to be worth more.
class Slow(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        compute()


class Kept(logging.Handler):
    """Keeps warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


it, kept = balancer(), Kept()
compute = Unequal(it._session, (0.001, 0.025, 0.025))
logging.getLogger("lbbsp.session").addHandler(kept)
fit(it, model(), Slow(), epochs=5)
result("sizes_by_default", it.sizes)
result("notices", [text for text in kept.texts if "largest batch" in text])


# Waiting and speed-up are in the logs that callbacks before the balancer see, too; each worker has
# scalars for TensorBoard; the figures are those of the run record.
class Board(keras.callbacks.TensorBoard):
    """Keras's callback without what needs the package tensorboard."""

    def on_epoch_end(self, epoch, logs=None):
        pass

    on_train_batch_end = on_test_end = on_epoch_end


keys: list[list[str]] = []


class Before(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        keys.append([*logs])


it, built, steps = balancer(record=shared / "logs", metrics_file=shared / "logs.prom"), model(), []
it._session.observers.append(lambda line: steps.append([line.step, line.sizes, line.busy_seconds]))
board = Board(shared / "board", write_graph=False, update_freq=2)
table = keras.callbacks.CSVLogger(shared / f"table-{it.rank}.csv")
data, said = it.dataset(FEATURES, LABELS, seed=3), io.StringIO()
with contextlib.redirect_stdout(said):
    history = built.fit(
        data, epochs=3, verbose=2,
        callbacks=[Before(), table, it, board], validation_data=(FEATURES[:50], LABELS[:50]),
    ).history  # fmt: skip
result("figures", {name: history[name] for name in Figures._fields})
result("steps", steps)
result("keys_of_steps", keys)
result("table", Path(table.filename).read_text())
result("progress", said.getvalue())
if it.rank == 0:
    points = [
        [file.parent.name, event.step, value.tag, float(tf.make_ndarray(value.tensor))]
        for file in sorted((shared / "board" / "lbbsp").glob("*/*"))
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    ]
    result("points", points)
it, built = balancer(logs=False), model()
result("without_figures", sorted(fit(it, built, epochs=1).history))
