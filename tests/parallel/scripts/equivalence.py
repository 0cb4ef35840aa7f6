"""Trains every case on uneven, changing batches, then in one process on whole batches.

A case ``NAME/BYTES`` sends its gradients in packs of so many bytes. In one ``NAME/shared`` workers
claim 40 % of each step in parts.
"""

import sys
from dataclasses import replace

import keras
import numpy as np
import tensorflow as tf
from comparison import SAMPLES, Trained, compare
from report import chosen, result

from lbbsp_core import EpochBalanced, LeaderStraggler, LoadBalanced, ProportionalControl
from lbbsp_core.runtime.exchange.buckets import in_buckets
from lbbsp_tf.compat import replaced
from lbbsp_tf.step import step
from lbbsp_tf.step.parts import Parts

L = keras.layers
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 10)).astype("f4")
LABELS = rng.integers(0, 3, SAMPLES)
TOKENS = rng.integers(0, 50, (SAMPLES, 6))
IMAGES = rng.normal(size=(SAMPLES, 8, 8, 3)).astype("f4")
WEIGHTS = rng.uniform(0.1, 2.0, SAMPLES).astype("f4")


class OwnStep(keras.Model):
    """A train_step of the user's own that never scales its loss."""

    def noise(self, draw, shape, *parameters):
        return 0.0

    def train_step(self, data):
        x, y = data
        x += self.noise(keras.random.beta, (), 2.0, 3.0)
        x += self.noise(keras.random.dropout, tf.ones((1, 10)), 0.5)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [g + self.noise(keras.random.normal, g.shape) for g in gradients]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, y_pred)


class Noisy(OwnStep):
    """Draws noise that no sample has: a number and a mask a batch, and noise of gradients."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seed = keras.random.SeedGenerator(5)

    def noise(self, draw, shape, *parameters):
        return 0.1 * draw(shape, *parameters, seed=self.seed)


def dense(model_class=keras.Model):
    inputs = L.Input((10,))
    hidden = L.Dense(32, activation="relu", kernel_regularizer="l2")(inputs)
    return model_class(inputs, L.Dense(3)(hidden))


def embedding():
    return keras.Sequential([L.Input((6,)), L.Embedding(50, 8), L.Flatten(), L.Dense(3)])


def recurrent():
    layers = L.Embedding(50, 4), L.LSTM(5, return_sequences=True), L.GRU(4), L.Dense(3)
    return keras.Sequential([L.Input((6,)), *layers])


def convolution(synchronized):
    norm = lambda: L.BatchNormalization(synchronized=synchronized)  # noqa: E731
    return keras.Sequential(
        [L.Input((8, 8, 3)), L.Conv2D(8, 3), norm(), L.ReLU(), L.Conv2D(8, 3), norm(), L.ReLU(),
         L.Flatten(), L.Dense(3)]
    )  # fmt: skip


def two_inputs():
    a, b = L.Input((10,), name="features"), L.Input((6,), name="tokens")
    joined = L.Concatenate()([L.Dense(8)(a), L.Flatten()(L.Embedding(50, 4)(b))])
    return keras.Model({"features": a, "tokens": b}, L.Dense(3)(joined))


def sgd(**options):
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def adamw(**options):
    return keras.optimizers.AdamW(1e-3, weight_decay=0.01, global_clipnorm=0.1, **options)


def classifier(build, optimizer, reduction="sum_over_batch_size"):
    """A compiled model: `build` is called with whether it is to be distributed."""

    def model(distributed):
        built = build(distributed)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        built.compile(optimizer(), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
        return built

    return model


MEAN = {"weight_by": "samples"}  # without a proof, which takes a third of a fit


def case(
    build,
    optimizer,
    x=FEATURES,
    weights=None,
    reduction="sum_over_batch_size",
    balancer=MEAN,
    **fit,
):
    model = classifier(lambda distributed: build(), optimizer, reduction)
    return Trained(model, x, LABELS, weights, balancer=balancer, fit=fit)


class Freezing(keras.callbacks.Callback):
    """Freezes a layer after the first epoch, with the idiom of Keras's guides."""

    def on_epoch_begin(self, epoch, logs=None):
        if keras.ops.convert_to_numpy(self.model.optimizer.iterations):
            self.model.layers[1].trainable = False
            self.model.make_train_function(force=True)


def double(x, y):
    return 2.0 * x, y


CASES = {
    "sgd_momentum_l2": case(dense, sgd, balancer={}),
    "adamw_global_clipnorm": case(dense, adamw),
    "embedding_sgd": case(embedding, sgd, TOKENS),
    "embedding_adamw_global_clipnorm": case(embedding, adamw, TOKENS),
    "recurrent": case(recurrent, adamw, TOKENS),
    "sample_weights": case(embedding, adamw, TOKENS, weights=WEIGHTS),
    "class_weights": case(dense, sgd, class_weight={0: 0.2, 1: 1.0, 2: 3.0}),
    "sum_reduction": case(
        dense, lambda: keras.optimizers.SGD(1e-3, momentum=0.9), reduction="sum", balancer={}
    ),
    "own_train_step": case(lambda: dense(OwnStep), lambda: sgd(clipnorm=0.05), balancer={}),
    "noise_without_samples": case(lambda: dense(Noisy), sgd, balancer={}),
    "loss_scaling": case(
        dense, lambda: keras.optimizers.LossScaleOptimizer(sgd(clipnorm=0.05), initial_scale=64.0)
    ),
    "dictionary_inputs": case(two_inputs, sgd, {"features": FEATURES, "tokens": TOKENS}),
    "map": Trained(classifier(lambda distributed: dense(), sgd), FEATURES, LABELS,
                   data={"map": double}),
    "synchronized_batch_norm": Trained(
        classifier(convolution, sgd), IMAGES, LABELS, balancer=MEAN
    ),
    "custom_loop": Trained(
        classifier(lambda distributed: dense(OwnStep), sgd), FEATURES, LABELS, balancer=MEAN,
        by_loop=True
    ),
    "frozen_by_a_callback": Trained(
        classifier(lambda distributed: dense(), sgd), FEATURES, LABELS, callbacks=[Freezing()]
    ),
    "load_balanced": case(dense, sgd),
    "epoch_balanced": case(dense, sgd),
    "proportional_control": case(dense, sgd),
    "leader_straggler": case(dense, sgd),
}  # fmt: skip
POLICIES = {
    "load_balanced": LoadBalanced(min_gain=0.0),
    "epoch_balanced": EpochBalanced(),
    "proportional_control": ProportionalControl(interval=1),
    "leader_straggler": LeaderStraggler(window=1),
}


strategy = tf.distribute.MultiWorkerMirroredStrategy()
options = strategy.extended._communication_options  # those that a script passes to the strategy


def train(name):
    case, _, size = name.partition("/")
    policy = POLICIES.get(case)
    mapped = (lambda x: 2.0 * x) if case == "map" else (lambda x: x)
    buckets, parts = [], []

    def counted(sizes, size):
        buckets.append(in_buckets(sizes, size))
        return buckets[-1]

    def claimed(all_parts):
        samples = claim(all_parts)
        parts.extend([len(samples)] * bool(len(samples)))
        return samples

    claim = Parts.claim
    trained, shares = CASES[case], size == "shared"
    if shares:
        trained = replace(trained, balancer={**trained.balancer, "share_work": 0.4})
    size = int(size) if size.isdigit() else options.bytes_per_pack
    with (
        replaced(options, "bytes_per_pack", size),
        replaced(step, "in_buckets", counted),
        replaced(Parts, "claim", claimed),
    ):
        compare(name, strategy, trained, policy, mapped=mapped)
    result(f"{name}/buckets", max(map(len, buckets)))
    result(f"{name}/parts", len(parts))


NAMES = [f"{case}{way}" for case in CASES for way in ("", "/1", "/100", "/shared")]
CANNOT_SHARE = [
    f"{case}/shared" for case in ("synchronized_batch_norm", "custom_loop", "noise_without_samples")
]
for name in chosen([name for name in NAMES if name not in CANNOT_SHARE], sys.argv[1:]):
    train(name)
