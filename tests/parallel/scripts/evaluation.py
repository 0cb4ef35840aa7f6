"""Evaluates, validates and predicts on any number of rows, and compares with one process.

Arguments: the kind of job, and names of cases and sources. The kinds are ``workers`` with a device
each, and ``mirrored`` for two devices of one worker.
"""

import sys

import fits
import keras
import numpy as np
import tensorflow as tf
from draws import collective_draws
from fits import two_devices
from own_metrics import BatchMeans, Extremes, overlap, spread
from report import chosen, result

import lbbsp_tf
from lbbsp_core.runtime.reliability.activity import Activity
from lbbsp_tf.activity import current_activity
from lbbsp_tf.compat import replaced
from lbbsp_tf.exchange.collectives import mirrored_collectives
from lbbsp_tf.reliability import board

L = keras.layers
X = 6
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(40, 10)).astype("f4")
LABELS = rng.integers(0, 3, 40)
TOKENS = rng.integers(1, 50, (40, 6))
IMAGES = rng.normal(size=(40, 8, 8, 3)).astype("f4")
WEIGHTS = rng.uniform(0.1, 2.0, 40).astype("f4")
kind, *names = sys.argv[1:]
is_mirrored = kind == "mirrored"
strategy = two_devices() if is_mirrored else tf.distribute.MultiWorkerMirroredStrategy()
balancer = lbbsp_tf.LoadBalancer(strategy, X)


def dense():
    return keras.Sequential(
        [L.Input((10,)), L.Dense(8, "tanh", kernel_regularizer="l2"), L.Dense(3)]
    )


def recurrent():
    return keras.Sequential([L.Input((6,)), L.Embedding(50, 4), L.LSTM(5), L.Dense(3)])


def convolution():
    return keras.Sequential(
        [L.Input((8, 8, 3)), L.Conv2D(4, 3), L.BatchNormalization(), L.Flatten(), L.Dense(3)]
    )


def two_outputs():
    x = L.Input((10,))
    return keras.Model(x, {"a": L.Dense(3, name="a")(x), "b": L.Dense(3, name="b")(x)})


def nested():
    a, b = L.Input((10,), name="features"), L.Input((6,), name="tokens")
    joined = L.Concatenate()([L.Dense(8)(a), L.Flatten()(L.Embedding(50, 4)(b))])
    return keras.Model({"features": a, "tokens": b}, L.Dense(3)(joined))


def ctc():
    x = L.Input((6,))
    return keras.Model(x, L.Bidirectional(L.LSTM(4, return_sequences=True))(L.Embedding(50, 4)(x)))


def scalar_loss(y_true, y_pred):
    logits = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    return tf.reduce_mean(logits)


def summed(y_true, y_pred):
    logits = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
    return tf.reduce_sum(logits)


class Summed(keras.losses.Loss):
    """A sum over samples that does not say so."""

    def call(self, y_true, y_pred):
        return summed(y_true, y_pred)


class OwnLoss(keras.Model):
    """Its loss is a sum, with those of regularisers."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return summed(y, y_pred) + sum(map(self._aggregate_additional_loss, self.losses))


class Average(keras.Model):
    """The test step of TensorFlow's tutorials on strategies."""

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        each = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        loss = tf.nn.compute_average_loss(each, global_batch_size=X)
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}


def of_class(cls):
    def build():
        x = L.Input((10,))
        return cls(x, L.Dense(3, kernel_regularizer="l2")(x))

    return build


def auc():
    return keras.metrics.AUC(name="auc")  # without a name, Keras numbers the models


def positives():
    return keras.metrics.TruePositives(name="positives")


def entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


class Case:
    """A model, and what it is evaluated on."""

    def __init__(self, build, x=FEATURES, y=LABELS, loss=None, weights=None, metrics=("accuracy",),
                 wrap=None):  # fmt: skip
        self.build, self.x, self.y, self.weights, self.wrap = build, x, y, weights, wrap
        self.loss, self.metrics = loss or entropy, metrics

    def model(self):
        keras.utils.set_random_seed(1)
        model = self.build()
        is_made = isinstance(self.loss, str | list) or self.loss in (scalar_loss, summed)
        loss = self.loss if is_made else self.loss()
        functions = (overlap, spread)
        metrics = [metric if isinstance(metric, str) or metric in functions else metric()
                   for metric in self.metrics]  # fmt: skip
        model.compile("sgd", loss, metrics=metrics or None)
        return model


class Added(L.Layer):
    """A layer that adds a loss of each sample."""

    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2, axis=-1))
        return x


def added():
    x = L.Input((10,))
    return keras.Model(x, Added()(L.Dense(3)(x)))


def masked():
    return keras.Sequential([L.Input((6,)), L.Embedding(50, 4, mask_zero=True), L.Dense(3)])


class OwnTracker(keras.Model):
    """A test_step with a metric of its own, which counts each batch once."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.tracker = keras.metrics.Mean(name="tracked")

    @property
    def metrics(self):
        return [self.tracker]

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.tracker.update_state(tf.reduce_mean((y_pred - tf.cast(y, "float32")[:, None]) ** 2))
        return {"tracked": self.tracker.result()}


def own_tracker():
    x = L.Input((10,))
    return OwnTracker(x, L.Dense(1)(x))


class OwnTest(keras.Model):
    """A test_step that returns a metric and tensors of its own."""

    def test_step(self, data):
        x, _ = data
        logs = super().test_step(data)
        y_pred = self(x, training=False)
        return logs | {"largest": tf.constant(7), "spread": tf.reduce_mean(y_pred**2)}


def own_test():
    x = L.Input((10,))
    return OwnTest(x, L.Dense(3)(x))


class OnlyMetrics(keras.Model):
    """A test_step without a loss, which gives no scalar to a `Mean`."""

    def test_step(self, data):
        x, y = data
        return self.compute_metrics(x, y, self(x, training=False))


def only_metrics():
    x = L.Input((10,))
    return OnlyMetrics(x, L.Dense(3)(x))


CASES = {
    "dense": Case(dense),
    "scalar_loss": Case(dense, loss=scalar_loss),
    "recurrent": Case(recurrent, TOKENS),
    "convolution": Case(convolution, IMAGES),
    "sample_weight": Case(dense, weights=WEIGHTS),
    "two_outputs": Case(two_outputs, y={"a": LABELS, "b": LABELS[::-1].copy()}, metrics=()),
    "nested_inputs": Case(nested, {"features": FEATURES, "tokens": TOKENS}),
    "ctc": Case(ctc, TOKENS, y=rng.integers(1, 7, (40, 2)), loss="ctc", metrics=()),
    "own_test_step": Case(own_test),
    "only_metrics": Case(only_metrics),
    "own_tracker": Case(own_tracker),
    "sum": Case(own_test, loss=lambda: entropy(reduction="sum")),
    "added_loss": Case(added),
    "summed_function": Case(dense, loss=summed),
    "summed_class": Case(of_class(keras.Model), loss=lambda: Summed(reduction=None)),
    "summed_compute_loss": Case(of_class(OwnLoss)),
    "average_loss": Case(of_class(Average), metrics=()),
    "one_of_two_outputs": Case(
        two_outputs,
        y={"a": LABELS, "b": LABELS[::-1].copy()},
        metrics=(),
        loss=lambda: {"a": summed, "b": None},
    ),
    "two_kinds_of_sums": Case(
        two_outputs,
        y={"a": LABELS, "b": LABELS[::-1].copy()},
        metrics=(),
        loss=lambda: {"a": summed, "b": entropy(reduction="sum")},
    ),
    "metrics_by_hand": Case(dense, metrics=(BatchMeans, Extremes)),
    "functions_by_hand": Case(of_class(keras.Model), metrics=(overlap, spread, "accuracy")),
    "masked": Case(masked, np.where(TOKENS % 4, TOKENS, 0), y=rng.integers(0, 3, (40, 6))),
    "auc": Case(
        dense,
        y=np.eye(3, dtype="f4")[LABELS],
        loss="categorical_crossentropy",
        metrics=("categorical_accuracy", auc, positives),
    ),
}
ROWS = 13  # batches of six, six and one


def close(ours, theirs):
    """Largest absolute difference of two nests of equal structure."""
    pairs = zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True)
    return max(float(np.abs(np.asarray(a, "f8") - np.asarray(b, "f8")).max()) for a, b in pairs)


def shapes(nest):
    return [list(np.shape(leaf)) for leaf in keras.tree.flatten(nest)]


def both(case):
    """Returns the model on all workers, and that of one process, which only the chief uses."""
    with strategy.scope():
        model = case.model()
    if balancer.rank:
        return model, None
    alone = case.model()
    # A trace is worth it only where Keras logs other losses of outputs without one.
    alone.run_eagerly = case.build is not two_outputs
    return model, alone


def compare(name, model, alone, x, y=None, **options):
    """Evaluates and predicts by both models, and reports the differences."""
    use = lambda each: (  # noqa: E731
        each.evaluate(x(), y, verbose=0, return_dict=True, **options),
        each.predict(x(), verbose=0, **{k: v for k, v in options.items() if k == "batch_size"}),
    )
    logs, predicted = use(model)
    total = sum(float(np.sum(leaf)) for leaf in keras.tree.flatten(predicted))
    found = {"logs": logs, "sum_of_predictions": total}
    if alone is not None:
        expected, one = use(alone)
        found["expected"] = expected
        found["same_shapes"] = shapes(predicted) == shapes(one)
        found["predictions"] = close(predicted, one)
    result(name, found)


def answer(call):
    """Returns the error of a call."""
    try:
        return f"{call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def evaluate_different_lengths():
    """Evaluates labels that are fewer than the features."""
    spec = (tf.TensorSpec((None, 10)), tf.TensorSpec((None,), tf.int64))
    batches = [(FEATURES[:6], LABELS[:4])]
    data = tf.data.Dataset.from_generator(lambda: batches, output_signature=spec)
    with strategy.scope():
        model = CASES["dense"].model()
    model.evaluate(data, verbose=0)


def fit(validation_data):
    data = balancer.dataset(FEATURES, LABELS, seed=1)
    return fits.fit(balancer, model, data, epochs=2, validation_data=validation_data)


class Rows(keras.utils.PyDataset):
    """Batches of a Python data set, the last of them with one row."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(X * index, min(X * index + X, ROWS))
        return FEATURES[rows], LABELS[rows]


def batches():
    """Yields the batches of `Rows`."""
    yield from (Rows()[index] for index in range(3))


def unknown_length():
    spec = (tf.TensorSpec((None, 10)), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


SOURCES = {
    "tf_data": lambda: tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).take(ROWS).batch(X),
    "unknown_length": unknown_length,
    "py_dataset": Rows,
    "generator": batches,
}
for name in chosen([*CASES, *SOURCES], names):
    case = CASES.get(name, CASES["dense"])
    models = both(case)  # not built: not even its metrics
    if name in SOURCES:
        compare(name, *models, SOURCES[name])
        continue
    x, y = keras.tree.map_structure(lambda a: a[:ROWS], (case.x, case.y))
    weights = None if case.weights is None else case.weights[:ROWS]
    compare(name, *models, lambda: x, y, sample_weight=weights, batch_size=X)  # noqa: B023

result("different_lengths", answer(evaluate_different_lengths))
model, alone = both(CASES["dense"])
own = np.random.default_rng(balancer.rank).permutation(30)  # as without a seed
result("different_evaluated", answer(lambda: model.evaluate(FEATURES[own], LABELS[own], verbose=0)))
result(
    "different_predicted", answer(lambda: model.predict(FEATURES[balancer.rank :: 2], verbose=0))
)
result(
    "different_batches", answer(lambda: model.predict(FEATURES[: 33 - balancer.rank], verbose=0))
)
result("different_validation", answer(lambda: fit((FEATURES[own], LABELS[own]))))
shown = model.test_on_batch(FEATURES[:5], LABELS[:5], return_dict=True)
predicted = model.predict_on_batch(FEATURES[:5])
found = {"rows": len(predicted), "logs": shown}
if alone is not None:
    alone.set_weights(model.get_weights())
    found["expected"] = alone.test_on_batch(FEATURES[:5], LABELS[:5], return_dict=True)
    found["difference"] = close(predicted, alone.predict_on_batch(FEATURES[:5]))
    found["alone"] = close(model.predict_on_batch(FEATURES[5:7]), alone(FEATURES[5:7]))
result("on_batch", found)
if not is_mirrored:  # worker 1 waits as in a collective that the chief does not call
    with current_activity().during(Activity.MEETING):
        with replaced(board, "_ELSEWHERE_SECONDS", 1):
            alone_error = "" if balancer.rank else answer(lambda: model.predict(FEATURES))
        mirrored_collectives(strategy).all_gather([0])
    result("evaluated_alone", alone_error)
with_steps = model.evaluate(SOURCES["tf_data"]().repeat(), steps=5, verbose=0)

# The loss and the metrics of validation inside `fit`, with fewer rows than workers.
history = fit((FEATURES[:1], LABELS[:1])).history
weights = model.get_weights()
if alone is not None:
    repeated = SOURCES["tf_data"]().repeat()
    result("steps", close(with_steps, alone.evaluate(repeated, steps=5, verbose=0)))
    alone.set_weights(weights)
    loss, accuracy = alone.evaluate(FEATURES[:1], LABELS[:1], verbose=0)
    result("expected_validation", [loss, accuracy])
result("validation", [history["val_loss"][-1], history["val_accuracy"][-1]])
result("collective_draws", collective_draws)
