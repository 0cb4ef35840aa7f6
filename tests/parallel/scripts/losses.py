"""Every form of loss that Keras users write, on uneven batches: exact, or refused with words."""

import sys
from typing import ClassVar

import keras
import numpy as np
import tensorflow as tf
from comparison import PLANS, SAMPLES, Trained, X, balanced, compare
from keras import ops
from report import largest_difference, result

import lbbsp_tf
from lbbsp_core.testing import ChangingPlans
from lbbsp_tf import training
from lbbsp_tf.step.train_step import Weighting

L = keras.layers
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 10)).astype("f4")
TARGETS = rng.normal(size=(SAMPLES, 1)).astype("f4")
LENGTHS = rng.integers(1, 7, SAMPLES)
TOKENS = np.where(np.arange(6) < LENGTHS[:, None], rng.integers(1, 50, (SAMPLES, 6)), 0)
WEIGHTS = rng.uniform(0.1, 2.0, SAMPLES).astype("f4")
TOKEN_WEIGHTS = rng.uniform(0.1, 2.0, (SAMPLES, 6)).astype("f4")


def sgd(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.9)


def dense(model_class=keras.Model):
    inputs = L.Input((10,))
    hidden = L.Dense(16, activation="tanh", kernel_regularizer="l2")(inputs)
    return model_class(inputs, L.Dense(1)(hidden))


def compiled(build, loss=None, rate=0.05, **options):
    def model(distributed):
        built = build(distributed)
        built.compile(sgd(rate), loss, **options)
        return built

    return model


def trained(build, loss=None, x=FEATURES, y=TARGETS, rate=0.05, balancer=None, **options):
    return Trained(compiled(build, loss, rate), x, y, balancer=balancer or {}, **options)


# Losses that return a scalar


def scalar_function(y, y_pred):
    return tf.reduce_mean(tf.square(y - y_pred))


class ScalarLoss(keras.losses.Loss):
    def __call__(self, y, y_pred, sample_weight=None):
        return ops.mean(ops.square(y - y_pred))


class OwnComputeLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + ops.sum(ops.stack(self.losses))


# Train steps of the user


class OwnStep(keras.Model):
    def loss_of(self, errors):
        return tf.reduce_mean(errors) + tf.add_n(self.losses)

    def change(self, gradients):
        return gradients

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(tf.square(y - self(x, training=True))[:, 0])
        gradients = self.change(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.logs(loss)

    def logs(self, loss):
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]


class DividesByReplicas(OwnStep):
    def loss_of(self, errors):
        return super().loss_of(errors) / tf.distribute.get_strategy().num_replicas_in_sync


class Vector(OwnStep):
    def loss_of(self, errors):
        return errors

    def logs(self, loss):
        return {"steps": tf.constant(1.0)}


class Sum(OwnStep):
    def loss_of(self, errors):
        return tf.reduce_sum(errors)


class ComputeAverage(OwnStep):
    """As in TensorFlow's guide to custom training with tf.distribute."""

    def loss_of(self, errors):
        regularizer = tf.nn.scale_regularization_loss(tf.add_n(self.losses))
        return tf.nn.compute_average_loss(errors, global_batch_size=X) + regularizer

    def logs(self, loss):
        return {"steps": tf.constant(1.0)}


class Clips(OwnStep):
    def change(self, gradients):
        return [tf.clip_by_norm(g, 10.0) for g in gradients]


class Contrastive(OwnStep):
    """Compares each sample with the others of its batch."""

    def loss_of(self, errors):
        return tf.reduce_mean(tf.square(errors[:, None] - errors[None, :]))


class Noisy(OwnStep):
    """Draws noise for each sample, as variational auto-encoders and GANs do."""

    def train_step(self, data):
        x, y = data
        return super().train_step((x + 0.1 * keras.random.normal(ops.shape(x)), y))


class NoGradients(OwnStep):
    """Forgets to apply its gradients."""

    def train_step(self, data):
        return self.logs(tf.reduce_mean(self(data[0], training=True)))


class Draws(OwnStep):
    """Keeps the noise that it draws for its first sample."""

    drawn: ClassVar[list[float]] = []

    def train_step(self, data):
        noise = keras.random.uniform(tf.shape(data[0])[:1])
        tf.numpy_function(lambda x: self.drawn.append(float(x)), [noise[0]], [])
        return super().train_step(data)


class Returns(OwnStep):
    """Returns its loss itself, for a loop."""

    def logs(self, loss):
        return {"loss": loss, "rows": tf.constant(1)}


class ReturnsSum(Returns):
    def loss_of(self, errors):
        return tf.reduce_sum(errors)


class ReturnsAverage(Returns, ComputeAverage):
    """Returns this worker's part of the loss."""

    logs = Returns.logs


class TwoOptimizers(keras.Model):
    """Two networks with an optimizer each in a dictionary, as GANs have."""

    def __init__(self):
        super().__init__()
        self.parts = {name: keras.Sequential([L.Input((10,)), L.Dense(8, "tanh"), L.Dense(1)])
                      for name in "ab"}  # fmt: skip
        # With a small epsilon, Adam takes a whole step for a gradient that consists of rounding.
        self.optimizers = {"a": keras.optimizers.Adam(0.01, epsilon=1e-3), "b": sgd()}
        self.tracker = keras.metrics.Mean(name="a_loss")

    def call(self, x):
        return self.parts["a"](x) + self.parts["b"](x)

    def train_step(self, data):
        x, y = data
        for name, part in self.parts.items():
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y - part(x)))
            gradients = tape.gradient(loss, part.trainable_variables)
            self.optimizers[name].apply(gradients, part.trainable_variables)
            if name == "a":
                self.tracker.update_state(loss)
        return {"a_loss": self.tracker.result()}


# Losses that layers add


class AddsVector(L.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.square(x)[:, 0])
        return x


class Endpoint(L.Layer):
    """The endpoint pattern of Keras's guides: a layer that computes the loss."""

    def __init__(self):
        super().__init__()
        self.loss_fn = keras.losses.MeanSquaredError()

    def call(self, targets, predictions):
        self.add_loss(self.loss_fn(targets, predictions))
        return predictions


def adds_vector(distributed):
    inputs = L.Input((10,))
    return keras.Model(inputs, L.Dense(1)(AddsVector()(L.Dense(8)(inputs))))


def endpoint(distributed):
    inputs, targets = L.Input((10,), name="inputs"), L.Input((1,), name="targets")
    predictions = L.Dense(1)(L.Dense(8, "tanh", kernel_regularizer="l2")(inputs))
    return keras.Model({"inputs": inputs, "targets": targets}, Endpoint()(targets, predictions))


# Means over tokens


def tagger(distributed, *layers):
    return keras.Sequential(
        [L.Input((6,)), L.Embedding(50, 8, mask_zero=True), *layers, L.Dense(3)]
    )


def recurrent_tagger(distributed):
    return tagger(distributed, L.LSTM(8, return_sequences=True))


def two_taggers(distributed):
    a, b = L.Input((6,), name="a"), L.Input((6,), name="b")
    embedding = L.Embedding(50, 8, mask_zero=True)
    return keras.Model(
        {"a": a, "b": b}, [L.Dense(3, name="c")(embedding(a)), L.Dense(3, name="d")(embedding(b))]
    )


def pooled(distributed):
    return keras.Sequential(
        [L.Input((6,)), L.Embedding(50, 8, mask_zero=True), L.LSTM(8), L.Dense(1)]
    )


def categorical(reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def dropping(distributed):
    return keras.Sequential([L.Input((10,)), L.Dense(64), L.Dropout(0.5), L.GaussianNoise(0.1),
                             L.Dense(1)])  # fmt: skip


def half():
    with_policy = {"dtype": "mixed_float16"}
    inputs = L.Input((10,))
    hidden = L.Dense(16, activation="tanh", **with_policy)(inputs)
    return keras.Model(inputs, L.Dense(1, dtype="float32")(hidden))


def two_outputs(distributed):
    inputs = L.Input((10,))
    return keras.Model(inputs, [L.Dense(1)(inputs), L.Dense(1)(inputs)])


TAGS = TOKENS % 3
BY_MASK = {"weight_by": "mask"}
EXACT = {
    "scalar_function": trained(lambda d: dense(), scalar_function),
    "scalar_loss_class": trained(lambda d: dense(), ScalarLoss()),
    "own_compute_loss": trained(lambda d: dense(OwnComputeLoss)),
    "own_step_mean": trained(lambda d: dense(OwnStep)),
    "loop": trained(lambda d: dense(OwnStep), by_loop=True),
    "own_step_divides_by_replicas": trained(lambda d: dense(DividesByReplicas)),
    "own_step_vector": trained(lambda d: dense(Vector), rate=1e-4),
    "own_step_sum": trained(lambda d: dense(Sum), rate=1e-4),
    "own_step_compute_average_loss": trained(lambda d: dense(ComputeAverage)),
    "two_optimizers": trained(lambda d: TwoOptimizers()),
    "add_loss_vector": trained(adds_vector, "mse", rate=1e-3),
    "endpoint": trained(endpoint, x={"inputs": FEATURES, "targets": TARGETS}, y=None),
    "mask_ends_in_pooling": trained(pooled, "mse", TOKENS),
    "mask": trained(tagger, categorical(), TOKENS, TAGS, balancer=BY_MASK),
    "mask_and_weights": trained(
        recurrent_tagger, categorical(), TOKENS, TAGS, balancer=BY_MASK, weights=TOKEN_WEIGHTS
    ),
    "two_masks": trained(
        two_taggers, [categorical(), categorical()], {"a": TOKENS, "b": TOKENS[::-1].copy()},
        (TAGS, TAGS[::-1].copy()), balancer=BY_MASK,
    ),
    "mean_with_sample_weight": trained(
        lambda d: dense(), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        balancer=BY_MASK, weights=WEIGHTS,
    ),
}  # fmt: skip
REFUSED = {
    "own_step_clips": trained(lambda d: dense(Clips)),
    "mask_reaches_the_loss": trained(tagger, categorical(), TOKENS, TAGS),
    "weights_divide_the_loss": trained(
        lambda d: dense(), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        weights=WEIGHTS,
    ),
    "sum_and_mean": trained(
        two_outputs, ["mse", keras.losses.MeanSquaredError(reduction="sum")], y=(TARGETS, TARGETS)
    ),
    "no_gradients": trained(lambda d: dense(NoGradients)),
    "verification_fails": trained(lambda d: dense(Contrastive), balancer={"verify": True}),
}  # fmt: skip
# Noise of one worker cannot be that of the whole batch, so only the proof is of interest.
ACCEPTED = {
    "dropout": trained(dropping, "mse"),
    "noise_in_step": trained(lambda d: dense(Noisy)),
    "contrastive_accepted": trained(
        lambda d: dense(Contrastive), balancer={"weight_by": "samples"}
    ),
    "own_noise": trained(lambda d: dense(Draws), balancer={"weight_by": "samples"}),
    "half_precision": Trained(
        compiled(lambda d: half(), "mse"), FEATURES, TARGETS
    ),
}  # fmt: skip


def convolution(distributed):
    return keras.Sequential(
        [L.Input((10,)), L.Reshape((5, 2)), L.Conv1D(8, 3),
         L.BatchNormalization(synchronized=distributed), L.ReLU(), L.Flatten(), L.Dropout(0.5),
         L.Dense(1)]
    )  # fmt: skip


VERIFIED = {
    "verified": trained(convolution, "mse", balancer={"verify": True}),
    "verified_tokens": trained(
        recurrent_tagger, categorical(), TOKENS, TAGS, balancer={"verify": True, **BY_MASK}
    ),
    "verified_error": trained(
        lambda d: dense(Contrastive), balancer={"verify": True, "weight_by": "samples"}
    ),
}


FOLLOWED = {
    "followed_mean": (Returns, 0.05),
    "followed_sum": (ReturnsSum, 1e-3),
    "followed_average": (ReturnsAverage, 0.05),
}


def following(strategy, model_class, rate):
    """Compares a loop whose learning rate follows its loss with the same in one process."""

    def build():
        keras.utils.set_random_seed(1)
        model = dense(model_class)
        model.compile(sgd(rate))
        model.optimizer.build(model.trainable_variables)
        return model

    def follow(model, steps):
        losses = []
        for results in steps:
            losses.append(float(results["loss"]))
            model.optimizer.learning_rate.assign(rate / (1 + losses[-1]))
        return losses

    balancer = lbbsp_tf.LoadBalancer(
        strategy, X, policy=ChangingPlans(PLANS[strategy.num_replicas_in_sync])
    )
    with strategy.scope():
        model = build()
    losses = []
    with balancer.loop(model.train_step, balancer.dataset(FEATURES, TARGETS, seed=0)) as loop:
        for _ in range(2):
            losses += follow(model, loop.epoch())
    other = build()
    step = tf.function(other.train_step, reduce_retracing=True)
    orders = [np.random.default_rng((0, epoch)).permutation(SAMPLES) for epoch in range(2)]
    batches = [order[k : k + X] for order in orders for k in range(0, SAMPLES, X)]
    batches = ((tf.constant(FEATURES[b]), tf.constant(TARGETS[b])) for b in batches)
    expected = follow(other, map(step, batches))
    return {
        "losses": max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)),
        "difference": largest_difference(model, other),
    }


if __name__ == "__main__":
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    for name in sys.argv[1:]:
        if name == "verification_fails":  # as if the proof had accepted it
            prove, training.prove = training.prove, lambda *_, **__: Weighting()
        if name in EXACT:
            compare(name, strategy, EXACT[name])
            continue
        if name in FOLLOWED:
            result(name, following(strategy, *FOLLOWED[name]))
            continue
        try:
            balancer, *_ = balanced(strategy, (REFUSED | ACCEPTED | VERIFIED)[name])
        except ValueError as error:
            result(name, str(error))
        else:
            result(name, balancer.verified_error if name in VERIFIED else "accepted")
            if name == "own_noise":
                result(name, Draws.drawn)
        if name == "verification_fails":
            training.prove = prove
