"""Two devices of one process: what a fit must not leave behind, and what it must refuse."""

import keras
import numpy as np
import tensorflow as tf
from fits import fit, two_devices
from report import largest_difference, result

import lbbsp_tf
from lbbsp_core import FixedShares

L = keras.layers
strategy = two_devices()
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 6)).astype("f4")
y = rng.normal(size=(64, 1)).astype("f4")
y[32:] *= 30  # what happens late in an epoch does not show in the first samples


def compiled(model, optimizer=None, loss="mse", **options):
    model.compile(optimizer or keras.optimizers.SGD(1e-3), loss, **options)
    return model


def dense():
    return compiled(keras.Sequential([L.Dense(3), L.Dense(1)]))


def fit_balanced(build, callbacks=(), **data):
    keras.utils.set_random_seed(1)
    balancer = lbbsp_tf.LoadBalancer(strategy, 16, policy=FixedShares([1, 3]))
    with strategy.scope():
        model = build()
    try:
        fit(balancer, model, balancer.dataset(x, y, shuffle=False, **data), *callbacks)
    except (RuntimeError, ValueError, tf.errors.InvalidArgumentError) as error:
        return model, str(error)
    return model, ""


def difference(build):
    """Returns the largest difference of a weight from that of one process."""
    keras.utils.set_random_seed(1)
    alone = build()
    alone.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    model, error = fit_balanced(build)
    assert not error, error
    return largest_difference(alone, model)


class Noisy(keras.Model):
    """Writes down noise that a `tf.function` draws."""

    def __init__(self):
        super().__init__()
        self.dropout, self.out, self.drawn = L.Dropout(0.5), L.Dense(1), []

    def build(self, shape):
        self.out.build(shape)

    @tf.function
    def call(self, inputs, training=False):
        noise = self.dropout(tf.ones_like(inputs), training=training)
        tf.numpy_function(lambda values: self.drawn.append(values), [noise], [])
        return self.out(inputs * noise)


def distinct_rows_of_noise():
    model, error = fit_balanced(lambda: compiled(Noisy()))
    assert not error, error
    return max(len(np.unique(values, axis=0)) for values in model.drawn[-2:])


class AddsVector(L.Layer):
    def call(self, inputs):
        self.add_loss(tf.reduce_sum(inputs**2, -1))
        return inputs


def adds_vector():
    model = keras.Sequential([L.Dense(3), AddsVector(), L.Dense(1)])
    return compiled(model, run_eagerly=True)


class Failing(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise RuntimeError("stops the fit")


def change_of_plain_fit_after_failure():
    """Returns how far a plain fit on zeros, after a balanced fit that failed, moves a kernel."""
    model, error = fit_balanced(dense, [Failing()])
    assert error == "stops the fit"
    before = model.layers[0].kernel.numpy()
    model.fit(0 * x, y, batch_size=16, verbose=0)
    return float(np.abs(model.layers[0].kernel.numpy() - before).max())


class Clipping(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply(tf.clip_by_global_norm(grads, 30.0)[0], trainable_variables)


class Compiled(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = L.Dense(1)

    def call(self, inputs):
        return self.out(inputs)

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


def doubled(*batch):
    return tuple(tf.concat([each, each], 0) for each in batch)


def in_scope():
    with strategy.scope():
        return fit_balanced(dense)[1]


result("noise", distinct_rows_of_noise())
result("add_loss_eagerly", difference(adds_vector))
result("plain_fit", change_of_plain_fit_after_failure())
result("in_scope", in_scope())
result("clips", fit_balanced(lambda: compiled(keras.Sequential([L.Dense(1)]), Clipping(0.01)))[1])
result("compiled_step", fit_balanced(lambda: compiled(Compiled()))[1])
result("doubled", fit_balanced(dense, batch_map=doubled)[1])
