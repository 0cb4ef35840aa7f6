"""Cases of optimizers, for `exactness`."""

import keras
import numpy as np
import tensorflow as tf
from exactness import FEATURES, SAMPLES, Case, rng, run

L, opt = keras.layers, keras.optimizers
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
        self.optimizers = hold(self, opt.Adam(1e-2), opt.SGD(0.1, momentum=0.9))
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
    adam, sgd = opt.Adam(1e-2), opt.SGD(0.1)
    return opt.MultiOptimizer(lambda variable: sgd if "head" in variable.path else adam)


def scaled(inner, **options):
    return opt.LossScaleOptimizer(inner, initial_scale=64.0, **options)


def decay():
    return opt.schedules.CosineDecay(0.0, 20, warmup_target=0.1, warmup_steps=3)


def case(optimizer=None, build=dense, *, dtype="float64", **options):
    """A case in float64, which tells a wrong update from rounding."""
    chosen = {} if optimizer is None else {"optimizer": optimizer}
    return Case(build, dtype=dtype, **chosen, **options)


CASES = {
    "clipnorm": case(lambda: opt.SGD(0.1, momentum=0.9, clipnorm=0.05)),
    "global_clipnorm": case(lambda: opt.SGD(0.1, global_clipnorm=0.1)),
    "clipvalue": case(lambda: opt.SGD(0.1, clipvalue=0.01)),
    "clipnorm_embedding": case(lambda: opt.Adam(1e-2, clipnorm=0.01), embedding, x=TOKENS),
    "weight_decay": case(lambda: opt.SGD(0.1, weight_decay=0.05)),
    "schedule": case(lambda: opt.SGD(decay())),
    "constraints": case(lambda: opt.SGD(0.3, momentum=0.9), constrained),
    "ema": case(lambda: opt.SGD(0.1, use_ema=True, ema_momentum=0.8)),
    "ema_overwrite": case(
        lambda: opt.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    ),
    "accumulation": case(lambda: opt.SGD(0.3, momentum=0.9, gradient_accumulation_steps=3)),
    "accumulation_clipped": case(
        lambda: opt.AdamW(
            opt.schedules.ExponentialDecay(1e-2, 4, 0.5),
            global_clipnorm=0.05,
            weight_decay=0.01,
            gradient_accumulation_steps=3,
        )
    ),
    "accumulation_embedding": case(
        lambda: opt.Adam(1e-2, gradient_accumulation_steps=2), embedding, x=TOKENS
    ),
    "accumulation_ema_overwrite": case(
        lambda: opt.Adam(
            1e-2, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2
        )
    ),
    "accumulation_constraints": case(
        lambda: opt.SGD(0.3, gradient_accumulation_steps=2), constrained
    ),
    "loss_scale_factor": case(lambda: opt.SGD(0.1, loss_scale_factor=8.0)),
    "loss_scaling_overflow": case(
        lambda: scaled(opt.SGD(0.1, momentum=0.9), dynamic_growth_steps=3), x=OVERFLOWING
    ),
    "loss_scaling_accumulation_overflow": case(
        lambda: scaled(opt.SGD(0.1, gradient_accumulation_steps=2)), x=OVERFLOWING
    ),
    "loss_scaling_ema_overwrite": case(
        lambda: scaled(opt.SGD(0.1, use_ema=True, ema_overwrite_frequency=2))
    ),
    "mixed_float16": case(dtype="mixed_float16"),
    "mixed_float16_overflow": case(dtype="mixed_float16", x=OVERFLOWING),
    "mixed_bfloat16": case(dtype="mixed_bfloat16"),
    "run_eagerly": case(options={"run_eagerly": True}),
    "adversarial": case(build=lambda: Adversarial(as_attributes)),
    "adversarial_dictionary": case(build=lambda: Adversarial(as_dictionary)),
    "adversarial_list": case(build=lambda: Adversarial(as_list)),
    "adversarial_outside": case(build=lambda: Adversarial(outside)),
    "multi_optimizer": case(by_layer),
    "adadelta": case(lambda: opt.Adadelta(1.0)),
    "adafactor": case(lambda: opt.Adafactor(1e-2)),
    "adagrad": case(lambda: opt.Adagrad(0.05)),
    "adam": case(lambda: opt.Adam(1e-2, amsgrad=True)),
    "adamax": case(lambda: opt.Adamax(1e-2)),
    "adamw": case(lambda: opt.AdamW(1e-2, weight_decay=0.1)),
    "ftrl": case(lambda: opt.Ftrl(0.1, l1_regularization_strength=1e-3)),
    "lamb": case(lambda: opt.Lamb(1e-2)),
    "lion": case(lambda: opt.Lion(1e-2, weight_decay=0.1)),
    "muon": case(lambda: opt.Muon(1e-2)),
    "nadam": case(lambda: opt.Nadam(1e-2)),
    "rmsprop": case(lambda: opt.RMSprop(1e-2, momentum=0.9, centered=True)),
    "schedule_free_adamw": case(lambda: opt.ScheduleFreeAdamW(1e-2)),
    "sgd": case(lambda: opt.SGD(0.1, momentum=0.9, nesterov=True)),
}


run(CASES)
