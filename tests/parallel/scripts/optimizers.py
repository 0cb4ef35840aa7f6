"""Trains with every optimizer on uneven, changing batches, then in one process on whole batches."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf
from plans import Cycle
from report import largest_difference, result

import lbbsp_tf

L, O, ops = keras.layers, keras.optimizers, keras.ops
X = 64
SAMPLES = 4 * X + 21  # a short last batch in every epoch
EPOCHS = 2
PLANS = ((48, 16), (40, 24), (7, 57))
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 10))
LABELS = rng.integers(0, 3, SAMPLES)
TOKENS = rng.integers(0, 50, (SAMPLES, 6))
OVERFLOWING = FEATURES.copy()
OVERFLOWING[[100, 200]] = np.inf  # two samples, each in the batch of one worker


def dense(**options):
    hidden = L.Dense(16, activation="tanh", kernel_regularizer="l2", **options)
    return keras.Sequential([L.Input((10,)), hidden, L.Dense(3, name="head")])


def embedding():
    return keras.Sequential([L.Input((6,)), L.Embedding(50, 8), L.Flatten(), L.Dense(3)])


def constrained():
    return dense(kernel_constraint=keras.constraints.MaxNorm(0.5), bias_constraint="non_neg")


class Adversarial(keras.Model):
    """A generator and a discriminator, each trained by an optimizer of its own.

    Args:
        hold: Stores two optimizers in the model, and returns a function that returns them.
    """

    def __init__(self, hold):
        super().__init__()
        self.generator = keras.Sequential([L.Input((10,)), L.Dense(10, activation="tanh")])
        self.discriminator = keras.Sequential([L.Input((10,)), L.Dense(8, "tanh"), L.Dense(1)])
        self.optimizers = hold(self, O.Adam(1e-2), O.SGD(0.1, momentum=0.9))
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, x):
        return self.discriminator(self.generator(x))

    def train_step(self, data):
        x, _ = data
        first, second = self.optimizers()
        ones = tf.ones((tf.shape(x)[0], 1), self.compute_dtype)
        with tf.GradientTape() as tape:
            fake, real = self(x), self.discriminator(x)
            loss = self.loss_of(ones, real) + self.loss_of(ones * 0, fake)
        variables = self.discriminator.trainable_variables
        first.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            loss = self.loss_of(ones, self(x))
        variables = self.generator.trainable_variables
        second.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def as_attributes(model, first, second):
    model.first, model.second = first, second
    return lambda: (model.first, model.second)


def as_dictionary(model, first, second):
    model.held = {"first": first, "second": second}
    return model.held.values


def as_list(model, first, second):
    model.held = [first, second]
    return lambda: model.held


def outside(model, first, second):
    return lambda: (first, second)


def by_layer():
    """Returns an optimizer that trains the layers of `dense` by two others."""
    return O.MultiOptimizer(
        lambda variable, pair=(O.Adam(1e-2), O.SGD(0.1)): pair["head" in variable.path]
    )


def scaled(inner, **options):
    return O.LossScaleOptimizer(inner, initial_scale=64.0, **options)


def decay():
    return O.schedules.CosineDecay(0.0, 20, warmup_target=0.1, warmup_steps=3)


@dataclass(frozen=True)
class Case:
    """One way to train: an optimizer, and what it trains.

    Rounding differs between one batch and its parts. Optimizers that enlarge it (they divide by
    small numbers, or take signs) are compared in float64.
    """

    optimizer: Callable[[], O.Optimizer] = lambda: O.SGD(0.1, momentum=0.9)
    build: Callable[[], keras.Model] = dense
    dtype: str = "float64"
    x: np.ndarray = field(default_factory=lambda: FEATURES)
    options: dict[str, object] = field(default_factory=dict)

    def model(self):
        keras.utils.set_random_seed(1)
        keras.config.set_floatx("float64" if self.dtype == "float64" else "float32")
        keras.config.set_dtype_policy(self.dtype)
        model = self.build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(self.optimizer(), loss, **self.options)
        return model


CASES = {
    "clipnorm": Case(lambda: O.SGD(0.1, momentum=0.9, clipnorm=0.05), dtype="float32"),
    "global_clipnorm": Case(lambda: O.SGD(0.1, global_clipnorm=0.1), dtype="float32"),
    "clipvalue": Case(lambda: O.SGD(0.1, clipvalue=0.01), dtype="float32"),
    "clipvalue_embedding": Case(lambda: O.Adam(1e-2, clipnorm=0.01), embedding, x=TOKENS),
    "weight_decay": Case(lambda: O.SGD(0.1, weight_decay=0.05), dtype="float32"),
    "schedule": Case(lambda: O.SGD(decay()), dtype="float32"),
    "constraints": Case(lambda: O.SGD(0.3, momentum=0.9), constrained, dtype="float32"),
    "ema": Case(lambda: O.SGD(0.1, use_ema=True, ema_momentum=0.8), dtype="float32"),
    "ema_overwrite": Case(
        lambda: O.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
        dtype="float32",
    ),
    "accumulation": Case(
        lambda: O.SGD(0.3, momentum=0.9, gradient_accumulation_steps=3), dtype="float32"
    ),
    "accumulation_clipped": Case(
        lambda: O.AdamW(
            O.schedules.ExponentialDecay(1e-2, 4, 0.5),
            global_clipnorm=0.05,
            weight_decay=0.01,
            gradient_accumulation_steps=3,
        )
    ),
    "accumulation_embedding": Case(
        lambda: O.Adam(1e-2, gradient_accumulation_steps=2), embedding, x=TOKENS
    ),
    "accumulation_ema_overwrite": Case(
        lambda: O.Adam(
            1e-2, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2
        )
    ),
    "accumulation_constraints": Case(
        lambda: O.SGD(0.3, gradient_accumulation_steps=2), constrained, dtype="float32"
    ),
    "loss_scale_factor": Case(lambda: O.SGD(0.1, loss_scale_factor=8.0), dtype="float32"),
    "loss_scaling_overflow": Case(
        lambda: scaled(O.SGD(0.1, momentum=0.9), dynamic_growth_steps=3), x=OVERFLOWING
    ),
    "loss_scaling_accumulation_overflow": Case(
        lambda: scaled(O.SGD(0.1, gradient_accumulation_steps=2)), x=OVERFLOWING
    ),
    "loss_scaling_ema_overwrite": Case(
        lambda: scaled(O.SGD(0.1, use_ema=True, ema_overwrite_frequency=2))
    ),
    "mixed_float16": Case(dtype="mixed_float16"),
    "mixed_float16_overflow": Case(dtype="mixed_float16", x=OVERFLOWING),
    "mixed_bfloat16": Case(dtype="mixed_bfloat16"),
    "run_eagerly": Case(dtype="float32", options={"run_eagerly": True}),
    "adversarial": Case(build=lambda: Adversarial(as_attributes)),
    "adversarial_dictionary": Case(build=lambda: Adversarial(as_dictionary)),
    "adversarial_list": Case(build=lambda: Adversarial(as_list)),
    "adversarial_outside": Case(build=lambda: Adversarial(outside)),
    "multi_optimizer": Case(by_layer),
    "adadelta": Case(lambda: O.Adadelta(1.0)),
    "adafactor": Case(lambda: O.Adafactor(1e-2)),
    "adagrad": Case(lambda: O.Adagrad(0.05)),
    "adam": Case(lambda: O.Adam(1e-2, amsgrad=True)),
    "adamax": Case(lambda: O.Adamax(1e-2)),
    "adamw": Case(lambda: O.AdamW(1e-2, weight_decay=0.1)),
    "ftrl": Case(lambda: O.Ftrl(0.1, l1_regularization_strength=1e-3)),
    "lamb": Case(lambda: O.Lamb(1e-2)),
    "lion": Case(lambda: O.Lion(1e-2, weight_decay=0.1)),
    "muon": Case(lambda: O.Muon(1e-2)),
    "nadam": Case(lambda: O.Nadam(1e-2)),
    "rmsprop": Case(lambda: O.RMSprop(1e-2, momentum=0.9, centered=True)),
    "schedule_free_adamw": Case(lambda: O.ScheduleFreeAdamW(1e-2)),
    "sgd": Case(lambda: O.SGD(0.1, momentum=0.9, nesterov=True)),
}


def whole_batches(x):
    """Global batches of the documented order."""
    for epoch in range(EPOCHS):
        order = np.random.default_rng((0, epoch)).permutation(SAMPLES)
        for first in range(0, SAMPLES, X):
            yield x[order[first : first + X]], LABELS[order[first : first + X]]


def alone(case):
    """The reference: one process, whole global batches, stock Keras."""
    model = case.model()
    steps = -(-SAMPLES // X)
    model.fit(whole_batches(case.x), steps_per_epoch=steps, epochs=EPOCHS, verbose=0)
    return model


def state(model):
    """What the optimizer counts, and a digest of the weights: the same on all workers."""
    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()[:16]
    optimizer = model.optimizer
    return {
        "digest": digest,
        "iterations": int(ops.convert_to_numpy(optimizer.iterations)),
        "scale": float(ops.convert_to_numpy(getattr(optimizer, "dynamic_scale", 1.0))),
    }


def compare(name, case):
    balancer = lbbsp_tf.LoadBalancer(strategy, X, policy=Cycle(PLANS))
    with strategy.scope():
        model = case.model()
    start = [w.copy() for w in model.get_weights()]
    model.fit(
        balancer.dataset(case.x, LABELS, seed=0),
        steps_per_epoch=balancer.steps_per_epoch,
        epochs=EPOCHS,
        callbacks=[balancer],
        verbose=0,
    )
    found = {"state": state(model)}
    if balancer.rank == 0:
        reference = alone(case)
        pairs = zip(start, reference.get_weights(), strict=True)
        found |= {
            "difference": largest_difference(model, reference),
            "moved": max(float(np.abs(a - b).max()) for a, b in pairs),
            "reference": state(reference),
        }
    return found


strategy = tf.distribute.MultiWorkerMirroredStrategy()
for name in sys.argv[1:] or CASES:
    try:
        result(name, compare(name, CASES[name]))
    except Exception as error:
        result(name, {"error": f"{type(error).__name__}: {error}"[:2000]})
