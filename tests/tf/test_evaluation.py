"""Rows of each replica in evaluation and prediction, without a cluster."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from lbbsp_tf import compat
from lbbsp_tf.compat.evaluation import Kind, ReplicaRows, Rows, has_mean_loss, rows_of, split_rows
from lbbsp_tf.compat.fitting import is_of_keras
from lbbsp_tf.compat.metrics import is_whole, whole_batches
from lbbsp_tf.exactness.effects import kinds_of_evaluated


def split(dataset, workers, replicas_per_worker=1):
    """Returns the rows of each worker's replicas, by worker."""
    replicas = workers * replicas_per_worker
    places = [range(rank, replicas, workers) for rank in range(workers)]
    return [
        [rows for _, *parts in split_rows(dataset, own, replicas) for rows in parts]
        for own in places
    ]


def kept(rows):
    """Returns the rows of a replica that are not to be discarded."""
    return rows.batch[: int(rows.rows)].numpy().tolist()


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("total", [1, 2, 3, 4, 7, 12])
def test_replicas_share_all_rows_evenly_and_in_order(total, replicas):
    parts = [rows_of(tf.range(total), place, replicas) for place in range(replicas)]
    assert [row for part in parts for row in kept(part)] == list(range(total))
    sizes = [int(part.rows) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(len(part.batch) == max(1, size) for part, size in zip(parts, sizes, strict=True))
    assert all(int(part.total) == total for part in parts)


def test_each_worker_takes_part_in_each_batch():
    ours, theirs = split(tf.data.Dataset.range(9).batch(4), workers=2)
    assert [kept(rows) for rows in ours] == [[0, 1], [4, 5], []]
    assert [kept(rows) for rows in theirs] == [[2, 3], [6, 7], [8]]


def test_several_replicas_of_a_worker_get_an_element_each():
    ours, theirs = split(tf.data.Dataset.range(8).batch(8), workers=2, replicas_per_worker=2)
    # `predict` joins the first replicas of all workers, then the second ones.
    assert [kept(rows) for rows in (*ours, *theirs)] == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_structures_ragged_and_sparse_tensors_and_scalars_are_kept():
    ragged = tf.ragged.constant([[1], [2, 2], [3]])
    sparse = tf.sparse.from_dense([[0, 1], [0, 0], [2, 0]])
    batch = ({"ragged": ragged, "sparse": sparse}, tf.range(3), tf.constant(0.5))
    dataset = tf.data.Dataset.from_tensors(batch)
    first, second = (parts[0] for parts in split(dataset, workers=2))
    assert isinstance(first, ReplicaRows)
    x, y, scalar = second.batch
    assert x["ragged"].to_list() == [[2, 2], [3]]
    assert tf.sparse.to_dense(x["sparse"]).numpy().tolist() == [[0, 0], [2, 0]]
    assert y.numpy().tolist() == [1, 2]
    assert float(scalar) == 0.5
    assert first.batch[0]["ragged"].to_list() == [[1]]


def test_evaluation_has_no_thread_that_can_hold_up_its_end():
    rows = Rows(tf.data.Dataset.range(9).batch(4), tf.distribute.MirroredStrategy(["CPU:0"]))
    assert rows._dataset.options().autotune.enabled is False  # by default it is None
    assert [kept(each) for each in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [each[0].numpy().tolist() for each in rows.samples] == [[0, 1, 2, 3], [4], [8]]


class Peers(keras.Model):
    """A model whose test step logs numbers of several kinds."""

    def __init__(self, numbers):
        x = keras.Input((2,))
        super().__init__(x, keras.layers.Dense(1, kernel_regularizer="l2")(x))
        self.numbers, self.tracker = numbers, keras.metrics.Mean(name="tracked")

    def test_step(self, data):
        y_pred = self(data[0], training=False)
        for number in self.numbers:
            self.tracker.update_state(number(y_pred, self.losses[0]))
        return {}


KINDS = {
    Kind.MEAN: lambda y, c: tf.reduce_mean(y**2) + c,
    Kind.SUM: lambda y, c: tf.reduce_sum(y**2),
    Kind.SUM_AND_REGULARISERS: lambda y, c: tf.reduce_sum(y**2) / 7 + c,
    Kind.OTHER: lambda y, c: tf.math.reduce_variance(y),
}


def test_numbers_of_a_test_step_are_means_or_sums(caplog):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        keras.utils.set_random_seed(0)
        model = Peers(list(KINDS.values()))
        model.compile("sgd", "mse")
    x = tf.constant(np.random.default_rng(0).normal(size=(7, 2)), tf.float32)
    assert kinds_of_evaluated(model, (x, x)) == list(KINDS)
    assert "Peers.test_step logs a number that is neither a mean nor a sum" in caplog.text
    (tracked,) = model.tracker.variables[:1]
    assert not float(tracked.value.values[0])


@pytest.mark.parametrize(
    ("loss", "is_mean"),
    [
        ("mse", True),
        (keras.losses.MeanSquaredError(), True),
        (keras.losses.Huber(reduction="sum"), False),
        ([keras.losses.mean_squared_error, None], True),
        ({"a": "mse", "b": lambda y, p: tf.reduce_sum(y - p)}, False),
    ],
)
def test_losses_of_keras_are_known(loss, is_mean):
    x = keras.Input((2,))
    model = keras.Model(x, keras.layers.Dense(1)(x))
    model.loss = loss
    assert has_mean_loss(model) is is_mean


def largest(y_true, y_pred):
    return tf.reduce_max(y_pred)


class ByHand(keras.metrics.Mean):
    """A subclass of a metric of Keras."""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (largest, False),
        (keras.metrics.MeanMetricWrapper(largest), False),
        (ByHand(), False),
        (keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error), True),
        (keras.metrics.AUC(), True),
        (keras.losses.Huber(), True),
    ],
)
def test_what_users_write_is_told_from_keras(code, expected):
    assert is_of_keras(code) is expected


def test_large_inputs_of_a_metric_stay_on_their_workers_and_are_named(caplog):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        x = keras.Input((None, 300))
        model = keras.Model(x, x)
        model.compile("sgd", "mse", metrics=[largest])
    x = np.random.default_rng(0).normal(size=(4, 60, 300)).astype("f4")
    model.evaluate(x, x, verbose=0)
    compat.take_whole_batches(model)
    (metric,) = model.metrics[1].metrics

    def update(values):
        with whole_batches((tf.constant(1.0), lambda tensors, run: run(tensors))):
            metric.update_state(values, values)

    strategy.run(update, (tf.constant(x[:, 0]),))
    assert "KiB" not in caplog.text
    assert is_whole(metric.variables[0])
    strategy.run(update, (tf.constant(x),))
    assert "the metric 'largest' gets more than 64 KiB of a sample" in caplog.text
    assert not is_whole(metric.variables[0])


def test_other_strategies_evaluate_and_predict_as_stock_keras_does():
    compat.patch_evaluation(*[lambda *_: pytest.fail("nothing to agree on")] * 4)
    x, y = np.random.default_rng(0).normal(size=(7, 3)).astype("f4"), np.zeros((7, 1), "f4")

    def outcome(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=["mae"])
        return model.evaluate(x, y, batch_size=4, verbose=0), model.predict(x, verbose=0)

    (logs, predictions), (expected, stock) = map(
        outcome, (tf.distribute.MirroredStrategy(["CPU:0"]), tf.distribute.get_strategy())
    )
    np.testing.assert_allclose(logs, expected, rtol=1e-6)
    np.testing.assert_allclose(predictions, stock, rtol=1e-6)
