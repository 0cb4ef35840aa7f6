"""Updates in only some of the steps work under a strategy, and stay Keras's own without one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from lbbsp_tf import compat

rng = np.random.default_rng(0)
FEATURES, TARGETS = rng.normal(size=(48, 4)), rng.normal(size=(48, 1))
OPTIONS = [
    {"gradient_accumulation_steps": 3},
    {"use_ema": True, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2, "use_ema": True, "ema_overwrite_frequency": 2},
]


@pytest.fixture(autouse=True)
def patch(monkeypatch):
    name = "_backend_apply_gradients"
    owner = compat.conditional_updates.TFOptimizer
    monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after the test
    compat.allow_conditional_updates()


def trained(strategy, options):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1, **options), "mse")
    model.fit(FEATURES, TARGETS, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("options", OPTIONS)
def test_a_strategy_updates_what_plain_keras_updates(options):
    plain = trained(tf.distribute.get_strategy(), options)
    mirrored = trained(tf.distribute.MirroredStrategy(["CPU:0"]), options)
    for ours, theirs in zip(mirrored, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_it_is_patched_once():
    patched = compat.conditional_updates.TFOptimizer._backend_apply_gradients
    compat.allow_conditional_updates()
    assert compat.conditional_updates.TFOptimizer._backend_apply_gradients is patched
