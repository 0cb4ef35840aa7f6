"""Optimizers that checkpoints hold, wherever the train step has them."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import lbbsp_tf
from lbbsp_core.runtime.checkpoint.checkpoint import newest_checkpoint
from lbbsp_tf.reliability import checkpoints

X, STEPS = 8, 5
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(X * STEPS, 3)).astype("f4")
TARGETS = rng.normal(size=(X * STEPS, 1)).astype("f4")


class Parts(keras.Model):
    """Two parts, of which `apply_last` applies the gradients of the second one."""

    def __init__(self, apply_last):
        super().__init__()
        self.first = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh")])
        self.last = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.apply_last = apply_last

    def call(self, x):
        return self.last(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        first, last = self.first.trainable_variables, self.last.trainable_variables
        gradients = tape.gradient(loss, [*first, *last])
        self.optimizer.apply(gradients[: len(first)], first)
        self.apply_last(self, gradients[len(first) :], last)
        return {"loss": loss}


def compiled_part():
    model = Parts(lambda self, *pair: self.last.optimizer.apply(*pair))
    model.last.compile(keras.optimizers.Adam(0.05))
    return model


def wrapped():
    model = Parts(lambda self, *pair: self.last.optimizer.apply(*pair))
    model.last.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05)))
    return model


def listed_in_a_layer():
    model = Parts(lambda self, *pair: self.first.layers[0].others[0].apply(*pair))
    model.first.layers[0].others = [keras.optimizers.Adam(0.05)]
    return model


def in_a_closure():
    other = keras.optimizers.Adam(0.05)
    return Parts(lambda self, *pair: other.apply(*pair))


OTHERS = []


def of_the_module():
    OTHERS[:] = [keras.optimizers.RMSprop(0.05)]
    return Parts(lambda self, *pair: OTHERS[0].apply(*pair))


class LeaveError(Exception):
    """Stands for the end of the process."""


class Leave(keras.callbacks.Callback):
    """Leaves after some steps, when what is due has been written."""

    def __init__(self, balancer, steps):
        super().__init__()
        self.balancer, self.steps, self.seen = balancer, steps, 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.seen == self.steps:
            self.balancer._checkpoints.schedule.flush()
            raise LeaveError
        self.seen += 1


def train(make, folder, steps=None):
    checkpoints._owners.clear()
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    given = {"checkpoint": folder, "every": 2} if folder else {}
    balancer = lbbsp_tf.LoadBalancer(tf.distribute.get_strategy(), X, **given)
    data = balancer.dataset(FEATURES, TARGETS, seed=1)
    leave = Leave(balancer, steps)
    with contextlib.suppress(LeaveError):
        model.fit(data, steps_per_epoch=STEPS, epochs=2, verbose=0, callbacks=[leave, balancer])
    return model, leave.seen


@pytest.mark.usefixtures("writes_each")
@pytest.mark.parametrize("make", [compiled_part, wrapped, listed_in_a_layer])
def test_optimizers_of_parts_continue_where_they_were(make, tmp_path):
    whole, _ = train(make, None)
    train(make, tmp_path, 7)
    assert newest_checkpoint(tmp_path).step == 6
    broken, steps = train(make, tmp_path)
    assert steps == 2 * STEPS - 6
    for ours, expected in zip(broken.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize(("make", "name"), [(in_a_closure, "Adam"), (of_the_module, "RMSprop")])
def test_optimizers_that_a_checkpoint_would_lack_are_named(make, name, tmp_path):
    with pytest.raises(ValueError, match=rf"Parts.train_step also applies {name}, which would be"):
        train(make, tmp_path)
    train(make, None)
