"""Checks of a model before a fit."""

import keras
import pytest
import tensorflow as tf

from lbbsp_tf.checks import check_model

L = keras.layers


@pytest.mark.parametrize(
    ("layer", "warnings"),
    [
        (L.BatchNormalization(), 1),
        (L.BatchNormalization(synchronized=True), 0),
        (L.BatchNormalization(trainable=False), 0),
        (L.LayerNormalization(), 0),
    ],
)
def test_plain_batch_normalisation_is_warned_about_with_the_remedy(layer, warnings, caplog):
    model = keras.Sequential([L.Input((4,)), layer, L.Dense(1)])
    model.compile("sgd", "mse")
    check_model(model, tf.distribute.get_strategy())
    assert len(caplog.records) == warnings
    assert all("lbbsp_tf.synchronize_batch_norm(model)" in r.message for r in caplog.records)
