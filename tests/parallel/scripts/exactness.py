"""Trains cases on uneven, changing batches, then in one process on whole global batches."""

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf
from report import largest_difference, result

import lbbsp_tf
from lbbsp_core.policy import FixedState

X = 64
SAMPLES = 4 * X + 21  # a short last batch in every epoch
EPOCHS = 2
PLANS = {2: ((48, 16), (40, 24), (7, 57)), 3: ((40, 16, 8), (30, 31, 3), (1, 20, 43))}
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 10))
LABELS = rng.integers(0, 3, SAMPLES)


@dataclass(frozen=True)
class Cycle:
    """A policy whose plan changes every step, whatever is measured."""

    plans: tuple[tuple[int, ...], ...]
    uses_costs = False
    is_static = False

    def init(self, cluster):
        return FixedState(self.plans[0])

    def update(self, state, cluster, observation):
        return FixedState(self.plans[(observation.step + 1) % len(self.plans)])


@dataclass(frozen=True)
class Case:
    """One way to train.

    Rounding differs between one batch and its parts. Where training enlarges it (optimizers that
    divide by small numbers, or take signs), a case uses float64.
    """

    build: Callable[[], keras.Model]
    optimizer: Callable[[], keras.optimizers.Optimizer] = lambda: keras.optimizers.SGD(
        0.1, momentum=0.9
    )
    dtype: str = "float32"
    x: np.ndarray = field(default_factory=lambda: FEATURES)
    distribute: Callable[[keras.Model], keras.Model] = lambda model: model
    options: Mapping[str, object] = field(default_factory=dict)

    def model(self, distributed):
        """The compiled model, with the same initial weights in each call."""
        keras.utils.set_random_seed(1)
        keras.config.set_floatx("float64" if self.dtype == "float64" else "float32")
        keras.config.set_dtype_policy(self.dtype)
        model = self.build()
        if distributed:
            model = self.distribute(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(self.optimizer(), loss, **self.options)
        return model


def run(cases: Mapping[str, Case]) -> None:
    """Prints the outcome of the cases that the command line names, or of all."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    for name in sys.argv[1:] or cases:
        result(name, _outcome(strategy, cases[name]))


def _outcome(strategy, case):
    """What a case came to; an error that all workers raise does not end the other cases."""
    try:
        return _compare(strategy, case)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def _compare(strategy, case):
    plans = PLANS[strategy.num_replicas_in_sync]
    balancer = lbbsp_tf.LoadBalancer(strategy, X, policy=Cycle(plans))
    with strategy.scope():
        model = case.model(distributed=True)
    start = [w.copy() for w in model.get_weights()]
    model.fit(
        balancer.dataset(case.x, LABELS, seed=0),
        steps_per_epoch=balancer.steps_per_epoch,
        epochs=EPOCHS,
        callbacks=[balancer],
        verbose=0,
    )
    found = {"state": _state(model)}
    if balancer.rank == 0:
        reference = _alone(case)
        pairs = zip(start, reference.get_weights(), strict=True)
        found |= {
            "difference": largest_difference(model, reference),
            "moved": max(float(np.abs(a - b).max()) for a, b in pairs),
            "reference": _state(reference),
        }
    return found


def _alone(case):
    """The reference: one process, whole global batches, stock Keras."""
    model = case.model(distributed=False)
    # Under a strategy, `fit` builds the optimizer before it traces the step. ScheduleFreeAdamW
    # needs that: Keras loses its initial values if it is built while the step is traced.
    model.optimizer.build(model.trainable_variables)
    steps = -(-SAMPLES // X)
    model.fit(_whole_batches(case.x), steps_per_epoch=steps, epochs=EPOCHS, verbose=0)
    return model


def _whole_batches(x):
    """Global batches of the documented order."""
    for epoch in range(EPOCHS):
        order = np.random.default_rng((0, epoch)).permutation(SAMPLES)
        for first in range(0, SAMPLES, X):
            batch = order[first : first + X]
            yield x[batch], LABELS[batch]


def _state(model):
    """What the optimizer counts, and a digest of the weights: the same on all workers."""
    steps = -(-SAMPLES // X) * EPOCHS
    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()[:16]
    optimizer = model.optimizer
    innermost = getattr(optimizer, "inner_optimizer", optimizer)
    scale = getattr(optimizer, "dynamic_scale", 1.0)
    return {
        "digest": digest,
        "iterations": int(keras.ops.convert_to_numpy(optimizer.iterations)),
        "skipped": steps - int(keras.ops.convert_to_numpy(innermost._iterations)),
        "scale": float(keras.ops.convert_to_numpy(scale)),
    }
