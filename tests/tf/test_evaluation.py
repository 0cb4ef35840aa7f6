"""Rows of each replica in evaluation and prediction, without a cluster."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from lbbsp_tf import compat
from lbbsp_tf.compat.evaluation import ReplicaRows, rows_of, split_rows


def split(dataset, workers, replicas_per_worker=1):
    """Returns what each worker's data set yields, by worker."""
    replicas = workers * replicas_per_worker
    contexts = [tf.distribute.InputContext(workers, rank, replicas) for rank in range(workers)]
    return [list(split_rows(dataset, context)) for context in contexts]


def kept(rows):
    """Returns the rows of a replica that are not to be discarded."""
    return rows.batch[: int(rows.rows)].numpy().tolist()


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("total", [1, 2, 3, 4, 7, 12])
def test_replicas_share_all_rows_evenly_and_in_order(total, replicas):
    parts = [rows_of(tf.range(total), tf.constant(place), replicas) for place in range(replicas)]
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
    assert [kept(rows) for rows in ours] == [[0, 1], [4, 5]]
    assert [kept(rows) for rows in theirs] == [[2, 3], [6, 7]]


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


def test_other_strategies_evaluate_and_predict_as_stock_keras_does():
    compat.patch_evaluation(lambda model, logs: pytest.fail("no logs to agree on"))
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
