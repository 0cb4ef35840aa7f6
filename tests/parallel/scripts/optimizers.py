"""Cases of optimizers, for `exactness`."""

import keras
import numpy as np
import tensorflow as tf
from comparison import BALANCERS, SAMPLES
from exactness import FEATURES, case, rng, run

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

    def change(self, gradients):
        return gradients

    def train_step(self, data):
        x, _ = data
        first, second = self.optimizers()
        ones = tf.ones((tf.shape(x)[0], 1), self.compute_dtype)
        with tf.GradientTape() as tape:
            fake, real = self(x), self.discriminator(x)
            loss = self.loss_of(ones, real) + self.loss_of(ones * 0, fake)
        variables = self.discriminator.trainable_variables
        gradients = self.change(tape.gradient(loss, variables))
        first.apply_gradients(zip(gradients, variables, strict=True))
        with tf.GradientTape() as tape:
            loss = self.loss_of(ones, self(x))
        variables = self.generator.trainable_variables
        second.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def summed(gradients):
    return BALANCERS[-1].sum_gradients(gradients)


class Sums(keras.Model):
    """A step that uses the gradients of the global batch; the cases say how."""

    def train_step(self, data):
        gradients = self.change(self.gradients(data))
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"norm": tf.linalg.global_norm(gradients)}

    def gradients(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return summed(tape.gradient(loss, self.trainable_variables))

    def change(self, gradients):
        return gradients


def changed(change):
    return type("Changes", (Sums,), {"change": lambda self, gradients: change(gradients)})


class Adaptive(Sums):
    """AGC: bounds the norm of each gradient by that of its variable."""

    def change(self, gradients):
        bounds = [0.05 * tf.norm(v) + 1e-3 for v in self.trainable_variables]
        return [tf.clip_by_norm(g, b) for g, b in zip(gradients, bounds, strict=True)]


class SharpnessAware(Sums):
    """SAM: the gradient at the largest loss nearby."""

    def gradients(self, data):
        first = super().gradients(data)
        norm = tf.linalg.global_norm(first) + 1e-12
        steps = [0.05 * g / norm for g in first]
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_add(step)
        second = super().gradients(data)
        for variable, step in zip(self.trainable_variables, steps, strict=True):
            variable.assign_sub(step)
        return second


class SumsOfLosses(Sums):
    """A loss that is a sum over samples, with a regulariser."""

    def compute_loss(self, x, y, y_pred):
        losses = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return tf.reduce_sum(losses) + tf.nn.scale_regularization_loss(tf.add_n(self.losses))

    def change(self, gradients):
        return tf.clip_by_global_norm(gradients, 0.1)[0]


class OwnMomentum(Sums):
    def build(self, shape):
        super().build(shape)
        self.kept = [self.add_weight(v.shape, "zeros", trainable=False, name="kept")
                     for v in self.trainable_variables]  # fmt: skip

    def change(self, gradients):
        for kept, gradient in zip(self.kept, gradients, strict=True):
            kept.assign(0.9 * kept + gradient)
        return [tf.sign(kept.value) for kept in self.kept]


class ClipsCritic(Adversarial):
    """Clips the gradients of one of its networks."""

    def change(self, gradients):
        return tf.clip_by_global_norm(summed(gradients), 0.05)[0]


class Clipping(opt.SGD):
    def apply(self, grads, trainable_variables=None):
        grads, _ = tf.clip_by_global_norm(summed(list(grads)), 0.1)
        return super().apply(grads, trainable_variables)


def noisy(gradients):
    """Adds noise, the same in each step, of a tenth of the norm."""
    size = 0.1 * tf.linalg.global_norm(gradients)
    return [
        g + size * tf.cos(tf.reshape(tf.range(tf.size(g), dtype=g.dtype), g.shape))
        for g in gradients
    ]


def sums(model_class=Sums, layers=None):
    """Builds `dense`, or a model of other layers, with another train step."""

    def build():
        built = (layers or dense)()
        return model_class(built.inputs, built.outputs[0])

    return build


def as_attributes(model, first, second):
    model.first, model.second = first, second
    return lambda: (model.first, model.second)


def in_containers(model, first, second):
    model.held = {"first": first, "others": [second]}
    return lambda: (model.held["first"], *model.held["others"])


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


CASES = {
    "clipnorm": case(dense, lambda: opt.SGD(0.1, momentum=0.9, clipnorm=0.05)),
    "global_clipnorm": case(dense, lambda: opt.SGD(0.1, global_clipnorm=0.1)),
    "clipvalue": case(dense, lambda: opt.SGD(0.1, clipvalue=0.01)),
    "clipnorm_embedding": case(embedding, lambda: opt.Adam(1e-2, clipnorm=0.01), x=TOKENS),
    "weight_decay": case(dense, lambda: opt.SGD(0.1, weight_decay=0.05)),
    "schedule": case(dense, lambda: opt.SGD(decay())),
    "constraints": case(constrained, lambda: opt.SGD(0.3, momentum=0.9)),
    "ema": case(dense, lambda: opt.SGD(0.1, use_ema=True, ema_momentum=0.8)),
    "ema_overwrite": case(
        dense,
        lambda: opt.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    ),
    "accumulation": case(
        dense, lambda: opt.SGD(0.3, momentum=0.9, gradient_accumulation_steps=3), proven=True
    ),
    "accumulation_clipped": case(
        dense,
        lambda: opt.AdamW(
            opt.schedules.ExponentialDecay(1e-2, 4, 0.5),
            global_clipnorm=0.05,
            weight_decay=0.01,
            gradient_accumulation_steps=3,
        ),
    ),
    "accumulation_embedding": case(
        embedding, lambda: opt.Adam(1e-2, gradient_accumulation_steps=2), x=TOKENS
    ),
    "accumulation_ema_overwrite": case(
        dense,
        lambda: opt.Adam(
            1e-2, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2
        ),
    ),
    "loss_scale_factor": case(dense, lambda: opt.SGD(0.1, loss_scale_factor=8.0)),
    "loss_scaling_overflow": case(
        dense, lambda: scaled(opt.SGD(0.1, momentum=0.9), dynamic_growth_steps=3), x=OVERFLOWING
    ),
    "loss_scaling_accumulation_overflow": case(
        dense, lambda: scaled(opt.SGD(0.1, gradient_accumulation_steps=2)), x=OVERFLOWING
    ),
    "loss_scaling_ema_overwrite": case(
        dense, lambda: scaled(opt.SGD(0.1, use_ema=True, ema_overwrite_frequency=2))
    ),
    "mixed_float16": case(dense, dtype="mixed_float16"),
    "mixed_float16_overflow": case(dense, dtype="mixed_float16", x=OVERFLOWING, proven=True),
    "mixed_bfloat16": case(dense, dtype="mixed_bfloat16"),
    "run_eagerly": case(dense, run_eagerly=True),
    "adversarial": case(lambda: Adversarial(as_attributes), proven=True),
    "adversarial_containers": case(lambda: Adversarial(in_containers), proven=True),
    "adversarial_outside": case(lambda: Adversarial(outside), proven=True),
    "sum_global_norm": case(
        sums(changed(lambda gs: tf.clip_by_global_norm(gs, 0.1)[0])), proven=True
    ),
    "sum_value": case(
        sums(changed(lambda gs: [tf.clip_by_value(g, -0.01, 0.01) for g in gs])), proven=True
    ),
    "sum_norms": case(
        sums(changed(lambda gs: [tf.clip_by_norm(g, 0.05) for g in gs])), proven=True
    ),
    "sum_adaptive": case(sums(Adaptive), proven=True),
    "sum_twice": case(sums(SharpnessAware), proven=True),
    "sum_normalised": case(
        sums(changed(lambda gs: [g / (tf.norm(g) + 1e-8) for g in gs])), proven=True
    ),
    "sum_signs": case(
        sums(changed(lambda gs: [tf.sign(g) for g in gs])), lambda: opt.SGD(1e-3), proven=True
    ),
    "sum_noise": case(sums(changed(noisy)), proven=True),
    "sum_in_apply": case(dense, lambda: Clipping(0.1, momentum=0.9), proven=True),
    "sum_own_momentum": case(sums(OwnMomentum), lambda: opt.SGD(1e-3), proven=True),
    "sum_unchanged": case(sums(), proven=True),
    "sum_critic": case(lambda: ClipsCritic(as_attributes), proven=True),
    "sum_embedding": case(
        sums(changed(lambda gs: tf.clip_by_global_norm(gs, 0.1)[0]), embedding),
        x=TOKENS,
        proven=True,
    ),
    "sum_of_losses": case(sums(SumsOfLosses), proven=True),
    "sum_unproven": case(sums(SharpnessAware)),
    "sum_eagerly": case(sums(SharpnessAware), proven=True, run_eagerly=True),
    "sum_scaled": case(dense, lambda: scaled(Clipping(0.1)), proven=True),
    "multi_optimizer": case(dense, by_layer, proven=True),
}
ALGORITHMS = {
    "adadelta": lambda: opt.Adadelta(1.0),
    "adafactor": lambda: opt.Adafactor(1e-2),
    "adagrad": lambda: opt.Adagrad(0.05),
    "adam": lambda: opt.Adam(1e-2, amsgrad=True),
    "adamax": lambda: opt.Adamax(1e-2),
    "adamw": lambda: opt.AdamW(1e-2, weight_decay=0.1),
    "ftrl": lambda: opt.Ftrl(0.1, l1_regularization_strength=1e-3),
    "lamb": lambda: opt.Lamb(1e-2),
    "lion": lambda: opt.Lion(1e-2, weight_decay=0.1),
    "muon": lambda: opt.Muon(1e-2),
    "nadam": lambda: opt.Nadam(1e-2),
    "rmsprop": lambda: opt.RMSprop(1e-2, momentum=0.9, centered=True),
    "schedule_free_adamw": lambda: opt.ScheduleFreeAdamW(1e-2),
    "sgd": lambda: opt.SGD(0.1, momentum=0.9, nesterov=True),
}
CASES |= {name: case(dense, optimizer) for name, optimizer in ALGORITHMS.items()}
run(CASES)
