"""Proof of how gradients are weighted, in a single process with few samples."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from lbbsp_tf.proof import Refusal, prove
from lbbsp_tf.train_step import TrainStep
from lbbsp_tf.verification import uneven_sizes
from lbbsp_tf.weighting import Weighting

L = keras.layers
ROWS = 9


def model(loss, *layers, regularizer=None, dtype=None):
    keras.utils.set_random_seed(0)
    hidden = [L.Dense(8, kernel_regularizer=regularizer), *layers, L.Dense(2)]
    built = keras.Sequential([L.Input((5,)), *hidden])
    built.compile("sgd", loss)
    return built


def found(built, y_columns=2):
    rng = np.random.default_rng(0)
    batch = (
        tf.constant(rng.normal(size=(ROWS, 5)), tf.float32),
        tf.constant(rng.uniform(size=(ROWS, y_columns)), tf.float32),
    )
    return prove(TrainStep.of_model(built), tf.distribute.get_strategy(), batch)


def scalar(y, y_pred):
    return tf.reduce_mean(tf.abs(y - y_pred))


def summed(y, y_pred):
    return tf.reduce_sum(tf.abs(y - y_pred))


def largest(y, y_pred):
    return tf.reduce_max(tf.abs(y - y_pred))


@pytest.mark.parametrize("loss", ["mse", scalar, keras.losses.MeanAbsoluteError()])
@pytest.mark.parametrize("regularizer", [None, "l2"])
def test_means_with_and_without_regularisers(loss, regularizer):
    assert found(model(loss, regularizer=regularizer)) == Weighting()


@pytest.mark.parametrize("loss", [summed, keras.losses.MeanAbsoluteError(reduction="sum")])
def test_sums(loss):
    assert found(model(loss)) == Weighting(sums=(True,))


@pytest.mark.parametrize("layer", [L.Dropout(0.5), L.GaussianNoise(1.0), L.BatchNormalization()])
def test_noise_and_batch_normalisation_do_not_disturb_the_proof(layer):
    assert found(model("mse", layer)) == Weighting()


def test_what_compares_samples_is_refused():
    refusal = found(model(largest))
    assert isinstance(refusal, Refusal)
    assert "Sequential (largest) is neither a mean nor a sum" in refusal.problem


def test_the_proof_changes_nothing():
    built = model("mse", L.BatchNormalization(), L.Dropout(0.5))
    before = [v.numpy().copy() for v in built.variables]
    found(built)
    for old, variable in zip(before, built.variables, strict=True):
        np.testing.assert_array_equal(old, variable.numpy())
    assert int(built.optimizer.iterations) == 0


def test_gradients_that_are_not_finite_prove_nothing_but_are_accepted(caplog):
    built = model(lambda y, y_pred: tf.reduce_mean(y_pred) / 0.0)
    assert found(built) == Weighting()
    assert "not finite" in caplog.text


@pytest.mark.parametrize(("total", "workers"), [(64, 3), (7, 3), (2, 2), (100, 7)])
def test_uneven_sizes_add_up(total, workers):
    sizes = uneven_sizes(total, workers)
    assert sum(sizes) == total
    assert len(sizes) == workers
    assert list(sizes) == sorted(sizes)
