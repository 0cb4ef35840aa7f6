"""Logs, models and files of a job: what callbacks see, and what they leave behind."""

import contextlib
import logging
import sys
import time
from pathlib import Path

import fits
import keras
import numpy as np
import own_steps
import tensorflow as tf
from own_metrics import Samples
from report import largest_difference, result

import lbbsp_tf
from lbbsp_core import FixedShares
from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_core.runtime.reliability.heartbeat import Beat
from lbbsp_tf.reliability.board import CoordinationBoard

L = keras.layers
X, SAMPLES = 16, 64
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 4)).astype("f4")
LABELS = (FEATURES.sum(axis=1, keepdims=True) > 0).astype("f4")
strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
shared = Path(sys.argv[1])


class RawLogs(keras.Model):
    """A model that logs tensors of its last batch, not metrics."""

    def train_step(self, data):
        x, y = data
        logs = super().train_step(data)
        y_pred = self(x, training=True)
        return logs | {"error": tf.reduce_mean((y_pred - y) ** 2), "constant": 3}


def model(cls=keras.Model, synchronized=None):
    """Builds a model, with batch normalisation if it is said whether that is synchronised."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        x = L.Input((4,))
        hidden = L.Dense(3, "tanh")(x)
        if synchronized is not None:
            hidden = L.BatchNormalization(synchronized=synchronized)(hidden)
        built = cls(x, L.Dense(1)(hidden))
        built.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return built


def balancer(weight_by="samples"):  # without a proof, which takes a third of a fit
    return lbbsp_tf.LoadBalancer(strategy, X, policy=FixedShares([1.0, 3.0]), weight_by=weight_by)


def fit(it, built, *callbacks, **options):
    data = it.dataset(FEATURES, LABELS, seed=3)
    return fits.fit(it, built, data, *callbacks, **{"epochs": 2} | options)


class Last(keras.callbacks.Callback):
    """Keeps the logs of epochs, and does something at the end of one."""

    def __init__(self, act=lambda model, epoch: None):
        super().__init__()
        self.act, self.logs = act, []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(logs)
        self.act(self.model, epoch)


def answer(*callbacks, **options):
    try:
        fit(balancer(), model(**options), *callbacks)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# Tensors in the logs are averaged over workers, weighted by their batches, before callbacks act.
it, built, seen = balancer(), model(RawLogs), Last()
fit(it, built, seen)
last = it._input.order.indices(7)
error = np.mean((built.predict(FEATURES[last], verbose=0) - LABELS[last]) ** 2)
result("raw_logs", {"logs": seen.logs, "error": error})
built = model()
with strategy.scope():
    built.compile("sgd", "mse", metrics=[Samples()])
history = fit(balancer(), built, validation_data=(FEATURES[:40], LABELS[:40])).history
result("variable_of_metric", [history["samples"], history["val_samples"]])
built, seen = model(RawLogs), Last()
plateau = keras.callbacks.ReduceLROnPlateau(
    "error", mode="min", factor=0.5, patience=0, min_delta=0.05, min_lr=1e-3
)
stopping = keras.callbacks.EarlyStopping(
    "error", mode="min", patience=2, min_delta=0.05, restore_best_weights=True
)
fit(balancer(), built, plateau, stopping, seen, epochs=8)
rate = float(keras.ops.convert_to_numpy(built.optimizer.learning_rate))
weights = [w.tolist() for w in built.get_weights()]
result("acting_on_raw_logs", {"epochs": len(seen.logs), "rate": rate, "weights": weights})

# A callback that acts on one worker only is found, by name.
result(
    "other_weights", answer(Last(lambda m, e: rank and m.layers[-1].kernel.assign_add([[1.0]] * 3)))
)
result("other_rate", answer(Last(lambda m, e: rank and setattr(m.optimizer, "learning_rate", 0.5))))


class AtTheEnd(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        if rank:
            self.model.layers[-1].kernel.assign_add([[1.0]] * 3)


result("other_weights_at_the_end", answer(AtTheEnd()))


class Warnings(logging.Handler):
    """Counts warnings about batch normalisation."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def emit(self, record):
        self.count += "call lbbsp_tf.synchronize_batch_norm(model), or" in record.getMessage()


class Unfreeze(keras.callbacks.Callback):
    """Lets a layer train from the second epoch on."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.layers[2].trainable = True
            self.model.make_train_function(force=True)


warnings = Warnings()
logging.getLogger("lbbsp.tf").addHandler(warnings)
found = {"answer": answer(synchronized=False), "fit": warnings.count}
built = model(synchronized=False)
it = balancer()
with it.loop(built.train_step, it.dataset(FEATURES, LABELS, seed=3)) as loop:
    list(loop.epoch())
found["loop"] = warnings.count
built = model(synchronized=False)
with strategy.scope():
    built.optimizer.build(built.trainable_variables)
built.layers[2].trainable = False
fit(balancer(), built, epochs=1)
found["frozen"] = warnings.count
fit(balancer(), built, Unfreeze(), epochs=2)
found["unfrozen"] = warnings.count
fit(balancer(), model(synchronized=True), epochs=1)
result("plain_batch_norm", found | {"synchronised": warnings.count})

# The seed of one worker makes it forget its random state, which a strategy creates on all at once.
built = model()
fit(balancer(), built)  # creates the state
if rank:
    keras.utils.set_random_seed(1)
result("one_seeded", fit(balancer(), built).history)


class Summary:
    """`tf.summary` for tests, without the package tensorboard, which only encodes the values."""

    def __getattr__(self, name):
        return getattr(tf.summary, name)

    def scalar(self, name, data, step=None):
        tf.summary.write(name, data, step)

    histogram = scalar


# Keras's callbacks leave one output per job; every worker may save to the same path.
tensorboard = keras.callbacks.TensorBoard(shared / "events", histogram_freq=1, write_graph=True)
tensorboard._summary_module = Summary()
csv = keras.callbacks.CSVLogger(str(shared / "log.csv"))
checkpoint = keras.callbacks.ModelCheckpoint(shared / "saved" / "{epoch}.keras")
weights = keras.callbacks.ModelCheckpoint(shared / "best.weights.h5", save_weights_only=True,
                                          save_best_only=True, monitor="val_loss")  # fmt: skip
own = Last(lambda m, e: m.save(shared / "own.keras"))
built = model(synchronized=True)
state = tf.train.Checkpoint(model=built, optimizer=built.optimizer)
manager = tf.train.CheckpointManager(state, shared / "managed", max_to_keep=1)
managed = Last(lambda m, e: manager.save())
fit(balancer(), built, tensorboard, csv, checkpoint, weights, own, managed,
    validation_data=(FEATURES[:5], LABELS[:5]))  # fmt: skip
mine = built.get_weights()
for _ in range(5):
    state.write(shared / "written")
built.save_weights(shared / "all.weights.h5")
result("barrier", lbbsp_tf.exchange.collectives.mirrored_collectives(strategy).all_gather([1]))
loaded = keras.models.load_model(shared / "own.keras").get_weights()
result("saved", largest_difference(mine, loaded))
alone = keras.models.clone_model(built)  # outside of the strategy's scope, as in one process
alone.compile("sgd")
alone.optimizer.build(alone.trainable_variables)
differences = {}
for path in (tf.train.latest_checkpoint(shared / "managed"), str(shared / "written")):
    alone.set_weights([0 * weight for weight in mine])
    state = tf.train.Checkpoint(model=alone, optimizer=alone.optimizer)
    state.read(path).assert_existing_objects_matched()
    differences[path.rpartition("/")[2]] = largest_difference(mine, alone)
result("checkpoints", {**differences, "steps": int(alone.optimizer.iterations.numpy())})

# A job that was interrupted continues from the chief's backup on all workers.


def interrupt(m, epoch):
    if epoch == 2:
        raise KeyError


def backup():
    return keras.callbacks.BackupAndRestore(shared / "backup")


with contextlib.suppress(KeyError):
    fit(balancer(), model(), backup(), Last(interrupt), epochs=4)
seen, restored = Last(), model()
callback = backup()
if rank:  # in a new process, only the chief finds a backup
    callback.on_train_begin = lambda logs=None: None
fit(balancer(), restored, callback, seen, epochs=4)
whole = model()
fit(balancer(), whole, epochs=4)
difference = largest_difference(restored, whole)
result("restored", {"epochs": len(seen.logs), "difference": difference})
# Models without call(), whose own steps train the models that they hold.
for name in sys.argv[2:]:
    it, (build, data) = balancer("auto"), own_steps.MODELS[name]
    with strategy.scope():
        keras.utils.set_random_seed(rank)
        built = build()
    start = [w.copy() for w in built.get_weights()]
    history = fits.fit(it, built, it.dataset(*data(FEATURES, LABELS)), epochs=2).history
    ends = built.get_weights()
    moved = largest_difference(start, ends) if start else 1.0
    result(name, {"history": history, "moved": moved, "weights": [w.tolist() for w in ends]})

if rank == 0:
    files = [str(path.relative_to(shared)) for path in sorted(shared.rglob("*")) if path.is_file()]
    result("files", files)
    result("csv", (shared / "log.csv").read_text().splitlines())
else:  # ends when the other worker is waiting for it at its end
    board = CoordinationBoard(rank)
    while Beat.of(board.read(0) or Beat().row()).activity != Activity.LEAVING:  # none: busy service
        time.sleep(0.1)
