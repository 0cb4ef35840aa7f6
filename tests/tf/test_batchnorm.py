"""Which layers `synchronize_batch_norm` converts, and which it refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from lbbsp_tf import compat, synchronize_batch_norm

L = keras.layers


@keras.saving.register_keras_serializable()
class NormalizedCell(L.Layer):
    """A recurrent cell that normalises its state."""

    def __init__(self, **options):
        super().__init__(**options)
        self.state_size, self.norm = 4, L.BatchNormalization()

    def call(self, x, states, training=None):
        hidden = self.norm(x + states[0], training=training)
        return hidden, [hidden]


class OwnStatistics(L.BatchNormalization):
    def _moments(self, inputs, mask):
        return super()._moments(inputs, mask)


def sequential(*layers):
    return keras.Sequential([L.Input((4,)), *layers])


def functional():
    inputs = L.Input((3, 4))
    nested = sequential(L.BatchNormalization(), sequential(L.BatchNormalization()))
    return keras.Model(inputs, L.TimeDistributed(nested)(inputs))


def frozen():
    model = sequential(L.BatchNormalization())
    model.trainable = False
    return model


def recurrent(**options):
    return L.Bidirectional(L.RNN(NormalizedCell(), **options))


def norms(model):
    return [layer for layer in model._flatten_layers() if isinstance(layer, L.BatchNormalization)]


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (functional, 2),
        (frozen, 1),
        (L.BatchNormalization, 1),
        (lambda: recurrent(unroll=True), 2),
        (lambda: sequential(L.GroupNormalization(2), L.LayerNormalization()), 0),
    ],
)
def test_layers_at_any_depth_are_synchronized(build, count):
    model = build()
    assert synchronize_batch_norm(model) is model
    assert len(norms(model)) == count
    assert all(layer.synchronized for layer in norms(model))


def test_a_saved_model_stays_synchronized(tmp_path):
    path = tmp_path / "model.keras"
    sequential(L.BatchNormalization()).save(path)
    synchronize_batch_norm(keras.models.load_model(path)).save(path)
    assert norms(keras.models.load_model(path))[0].synchronized


def test_a_trained_model_keeps_its_optimizer_and_is_traced_again():
    model = sequential(L.BatchNormalization())
    model.compile("adam", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0)
    optimizer = model.optimizer
    synchronize_batch_norm(model)
    assert model.optimizer is optimizer
    assert model.train_function is None
    model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0)
    assert int(optimizer.iterations) == 2
    traced = model.train_function
    assert synchronize_batch_norm(model).train_function is traced  # nothing changed


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sequential(OwnStatistics()), "OwnStatistics overrides how BatchNormalization"),
        (lambda: recurrent(), "inside a recurrent layer.*pass unroll=True"),
    ],
)
def test_what_cannot_be_synchronized_is_refused_with_the_remedy(build, message):
    model = build()
    with pytest.raises(ValueError, match=message):
        synchronize_batch_norm(model)
    assert not any(layer.synchronized for layer in norms(model))


@pytest.mark.parametrize("masked", [False, True])
def test_a_large_mean_does_not_cancel_the_variance(masked):
    compat.synchronize_moments()
    x = np.random.default_rng(0).normal(1e4, 1.0, (64, 5, 3)).astype("f4")
    mask = np.arange(5) < (3 if masked else 5)
    used = x[:, mask].reshape(-1, 3).astype("f8")
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        layer = L.BatchNormalization(synchronized=True, moving_mean_initializer="ones")
        layer.build(x.shape)
        layer.moving_mean.assign([1e4, 1e4, 1e4])
    moments = lambda: layer._moments(  # noqa: E731
        tf.constant(x), tf.constant(np.tile(mask, (64, 1))) if masked else None
    )
    mean, variance = strategy.run(tf.function(moments))
    np.testing.assert_allclose(mean, used.mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance, used.var(0), rtol=1e-3)
