"""Gradients inside the step through synchronised batch normalisation, on two devices."""

import sys

import keras
import numpy as np
import tensorflow as tf
from fits import fit, two_devices
from report import largest_difference, result

import lbbsp_tf
from lbbsp_core import FixedShares

L = keras.layers
keras.config.set_floatx("float64")
strategy = two_devices()
rng = np.random.default_rng(0)
X = rng.normal(size=(64, 6))
Y = rng.normal(size=(64, 1))


class Step(keras.Model):
    """A step whose loss takes a gradient of its own."""

    def __init__(self):
        super().__init__()
        self.stem = keras.Sequential([L.Dense(8), L.BatchNormalization(), L.Activation("tanh")])
        self.head = keras.Sequential([L.BatchNormalization(), L.Dense(4, "tanh"), L.Dense(1)])

    def call(self, x, training=False):
        return self.head(self.stem(x, training=training), training=training)

    def errors(self, x, y):
        return tf.reduce_mean((self(x, training=True) - y) ** 2, -1)

    def inner(self, target, x):
        """Returns the gradient of ``target(x)`` for each sample."""
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = target(x)
        return tape.gradient(value, x)

    def loss_of(self, x, y):
        return tf.reduce_mean(self.errors(x, y))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables),
                             self.trainable_variables)  # fmt: skip
        return {"loss": loss}


class GradientPenalty(Step):
    """WGAN-GP: the gradient of a vector of outputs."""

    def loss_of(self, x, y):
        norm = tf.norm(self.inner(lambda x: self(x, training=True), x), axis=-1)
        return super().loss_of(x, y) + 10.0 * tf.reduce_mean((norm - 1.0) ** 2)


class PenaltyAlone(Step):
    """The penalty without the loss, behind another activation."""

    def __init__(self):
        super().__init__()
        self.stem = keras.Sequential([L.Dense(8), L.BatchNormalization(), L.LeakyReLU()])

    def loss_of(self, x, y):
        norm = tf.norm(self.inner(lambda x: self(x, training=True), x), axis=-1)
        return tf.reduce_mean((norm - 1.0) ** 2)


class ZeroCentred(Step):
    """R1: the gradient of a sum."""

    def loss_of(self, x, y):
        gradient = self.inner(lambda x: tf.reduce_sum(self(x, training=True)), x)
        return super().loss_of(x, y) + tf.reduce_mean(tf.reduce_sum(gradient**2, -1))


class Twice(Step):
    """The gradient of a gradient, in a loss that is a sum."""

    def loss_of(self, x, y):
        norm = lambda x: self.inner(lambda x: self(x, training=True), x) ** 2  # noqa: E731
        return 0.01 * tf.reduce_sum(self.errors(x, y) + self.inner(norm, x)[:, 0])


class Sign(Step):
    """FGSM: the sign of the gradient of a mean."""

    def loss_of(self, x, y):
        mean = lambda x: tf.reduce_mean(self.errors(x, y))  # noqa: E731
        return super().loss_of(x + 0.3 * tf.sign(self.inner(mean, x)), y)


class Raw(Step):
    """An adversarial input by the gradient of a sum, which no derivative goes through."""

    def train_step(self, data):
        x, y = data
        gradient = self.inner(lambda x: tf.reduce_sum(self.errors(x, y)), x)
        return super().train_step((x + 0.3 * gradient, y))


class Saliency(Step):
    """The gradient with respect to an inner activation, and with respect to the weights."""

    def loss_of(self, x, y):
        features = self.stem(x, training=True)
        gradient = self.inner(lambda f: self.head(f, training=True), features)
        return super().loss_of(x, y) + tf.reduce_mean(tf.abs(features * gradient))


class Penalised(Step):
    """A gradient penalty in `compute_loss`."""

    train_step = keras.Model.train_step

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        norm = tf.norm(self.inner(lambda x: self(x, training=True), x), axis=-1)
        return tf.reduce_mean((y - y_pred) ** 2) + tf.reduce_mean((norm - 1.0) ** 2)


class DividedSum(Step):
    """Divides the gradients of a sum by the number of samples."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.errors(*data))
        count = tf.cast(tf.shape(data[0])[0], loss.dtype)
        gradients = [g / count for g in tape.gradient(loss, self.trainable_variables)]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class MeanAndSum(Step):
    """Two losses behind synchronised layers, one of which is a sum."""

    def __init__(self):
        super().__init__()
        self.second = keras.Sequential([L.BatchNormalization(), L.Dense(1)])
        self.other = keras.optimizers.SGD(1e-3)

    def call(self, x, training=False):
        self.second(self.stem(x, training=training), training=training)
        return super().call(x, training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            features = self.stem(x, training=True)
            mean = tf.reduce_mean((self.head(features, training=True) - y) ** 2)
            total = tf.reduce_sum((self.second(features, training=True) - y) ** 2)
        both = ((mean, self.stem.trainable_variables + self.head.trainable_variables,
                 self.optimizer), (total, self.second.trainable_variables, self.other))  # fmt: skip
        for loss, variables, optimizer in both:
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"mean": mean}


class Jacobian(Step):
    """A gradient of each output by itself, in a loop of the graph."""

    def loss_of(self, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = self(x, training=True)
        return super().loss_of(x, y) + tf.reduce_mean(tape.batch_jacobian(value, x) ** 2)


class Symbolic(GradientPenalty):
    """Takes the gradient without a tape."""

    def inner(self, target, x):
        return tf.gradients(target(x), x)[0]


CASES = [GradientPenalty, PenaltyAlone, ZeroCentred, Twice, Sign, Raw, Saliency, Penalised,
         DividedSum, MeanAndSum, Jacobian, Symbolic]  # fmt: skip


def compiled(case):
    keras.utils.set_random_seed(1)
    model = case()
    model(X[:1])
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9))
    return model


def difference(case):
    """Returns the largest difference from one process, relative to what it has learned."""
    balancer = lbbsp_tf.LoadBalancer(strategy, 16, policy=FixedShares([1, 3]))
    with strategy.scope():
        model = lbbsp_tf.synchronize_batch_norm(compiled(case))
    fit(balancer, model, balancer.dataset(X, Y, shuffle=False), epochs=3)
    alone = compiled(case)
    start = alone.get_weights()
    alone.run_eagerly = True  # a trace takes longer than the few steps
    alone.fit(X, Y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return largest_difference(alone, model) / largest_difference(start, alone)


for case in CASES:
    if not sys.argv[1:] or case.__name__ in sys.argv[1:]:
        try:
            result(case.__name__, difference(case))
        except ValueError as error:
            result(case.__name__, str(error))
