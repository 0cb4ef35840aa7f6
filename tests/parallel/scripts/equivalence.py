"""Trains every case on uneven, changing batches, then in one process on whole batches."""

import sys
import time

import keras
import numpy as np
import tensorflow as tf
from exactness import PLANS, Cycle
from report import largest_difference, result

import lbbsp_tf
from lbbsp_core import EpochBalanced, LeaderStraggler, LoadBalanced, ProportionalControl

L = keras.layers
X = 64
SAMPLES = 10 * X + 21  # a short last batch in every epoch
EPOCHS = 2
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 10)).astype("f4")
LABELS = rng.integers(0, 3, SAMPLES)
TOKENS = rng.integers(0, 50, (SAMPLES, 6))
IMAGES = rng.normal(size=(SAMPLES, 8, 8, 3)).astype("f4")
WEIGHTS = rng.uniform(0.1, 2.0, SAMPLES).astype("f4")


class OwnStep(keras.Model):
    """A train_step of the user's own that never scales its loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, y_pred)


def dense(model_class=keras.Model):
    inputs = L.Input((10,))
    hidden = L.Dense(32, activation="relu", kernel_regularizer="l2")(inputs)
    return model_class(inputs, L.Dense(3)(hidden))


def embedding():
    return keras.Sequential([L.Input((6,)), L.Embedding(50, 8), L.Flatten(), L.Dense(3)])


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


class Case:
    """One way to train: what to build, and what to feed."""

    def __init__(self, build, optimizer, x=FEATURES, weights=None, reduction="sum_over_batch_size",
                 distributed=None, map=None, policy=None, **fit):  # fmt: skip
        self.build, self.optimizer, self.x, self.weights = build, optimizer, x, weights
        self.reduction, self.fit, self.map, self.policy = reduction, fit, map, policy
        self.build_distributed = distributed or build

    def model(self, distributed):
        keras.utils.set_random_seed(1)
        model = self.build_distributed() if distributed else self.build()
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=self.reduction
        )
        model.compile(self.optimizer(), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
        return model


def double(x, y):
    return 2.0 * x, y


CASES = {
    "sgd_momentum_l2": Case(dense, sgd),
    "adamw_global_clipnorm": Case(dense, adamw),
    "embedding_sgd": Case(embedding, sgd, TOKENS),
    "embedding_adamw_global_clipnorm": Case(embedding, adamw, TOKENS),
    "sample_weights": Case(embedding, adamw, TOKENS, weights=WEIGHTS),
    "class_weights": Case(dense, sgd, class_weight={0: 0.2, 1: 1.0, 2: 3.0}),
    "sum_reduction": Case(dense, lambda: keras.optimizers.SGD(1e-3, momentum=0.9), reduction="sum"),
    "own_train_step": Case(lambda: dense(OwnStep), lambda: sgd(clipnorm=0.05)),
    "loss_scaling": Case(
        dense, lambda: keras.optimizers.LossScaleOptimizer(sgd(clipnorm=0.05), initial_scale=64.0)
    ),
    "dictionary_inputs": Case(two_inputs, sgd, {"features": FEATURES, "tokens": TOKENS}),
    "map": Case(dense, sgd, map=double),
    "synchronized_batch_norm": Case(
        lambda: convolution(False), sgd, IMAGES, distributed=lambda: convolution(True)
    ),
    "load_balanced": Case(dense, sgd, policy=LoadBalanced(min_gain=0.0)),
    "epoch_balanced": Case(dense, sgd, policy=EpochBalanced()),
    "proportional_control": Case(dense, sgd, policy=ProportionalControl(interval=1)),
    "leader_straggler": Case(dense, sgd, policy=LeaderStraggler(window=1)),
}


class Sees(keras.callbacks.Callback):
    """Makes the first worker slow, and keeps the plans."""

    def __init__(self, balancer, seconds):
        super().__init__()
        self.balancer, self.seconds, self.plans = balancer, seconds, set()

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(self.seconds if self.balancer.rank == 0 else 0.0)
        self.plans.add(self.balancer.sizes)


def alone(case):
    """The reference: one process, whole global batches of the documented order."""
    model, history = case.model(distributed=False), []
    x = keras.tree.map_structure(lambda a: 2.0 * a, case.x) if case.map else case.x
    for epoch in range(EPOCHS):
        order = np.random.default_rng((0, epoch)).permutation(SAMPLES)
        taken = keras.tree.map_structure(lambda a: a[order], x)  # noqa: B023
        weights = None if case.weights is None else case.weights[order]
        fitted = model.fit(taken, LABELS[order], sample_weight=weights, batch_size=X,
                           shuffle=False, verbose=0, **case.fit)  # fmt: skip
        history.append({name: values[0] for name, values in fitted.history.items()})
    return model, history


strategy = tf.distribute.MultiWorkerMirroredStrategy()
workers = strategy.num_replicas_in_sync
for name in sys.argv[1:] or CASES:
    case = CASES[name]
    policy = case.policy or Cycle(PLANS[workers])
    balancer = lbbsp_tf.LoadBalancer(strategy, X, policy=policy)
    sees = Sees(balancer, 0.02 if case.policy else 0.0)
    with strategy.scope():
        model = case.model(distributed=True)
    start = [w.copy() for w in model.get_weights()]
    fitted = model.fit(
        balancer.dataset(case.x, LABELS, case.weights, seed=0, map=case.map),
        steps_per_epoch=balancer.steps_per_epoch,
        epochs=EPOCHS,
        callbacks=[balancer, sees],
        verbose=0,
        **case.fit,
    )
    if balancer.rank == 0:
        reference, history = alone(case)
        moved = max(
            float(np.abs(a - b).max()) for a, b in zip(start, reference.get_weights(), strict=True)
        )
        logs = max(
            abs(fitted.history[key][epoch] - history[epoch][key])
            for epoch in range(EPOCHS)
            for key in history[epoch]
        )
        result(name, {"difference": largest_difference(model, reference), "moved": moved,
                      "logs": logs, "plans": len(sees.plans)})  # fmt: skip
