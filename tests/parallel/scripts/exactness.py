"""Compares cases of optimizers and layers: weights, what is counted, and the workers' agreement."""

import hashlib
import sys

import keras
import numpy as np
import tensorflow as tf
from comparison import EPOCHS, SAMPLES, Trained, X, balanced
from report import chosen, largest_difference, result

rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 10))
LABELS = rng.integers(0, 3, SAMPLES)
STEPS = -(-SAMPLES // X)


def case(
    build, optimizer=None, *, x=FEATURES, dtype="float64", convert=None, proven=False, **options
):
    """A classifier to train; its distributed model is `convert` of the one that `build` returns.

    Rounding differs between one batch and its parts, and some optimizers enlarge it: they divide
    by small numbers, or take signs. In float64 only a wrong update makes a difference.
    Unless `proven`, the loss is taken to be a mean, which saves time.
    """

    def model(distributed):
        keras.config.set_floatx("float64" if dtype == "float64" else "float32")
        keras.config.set_dtype_policy(dtype)
        built = build()
        if distributed and convert:
            built = convert(built)
        chosen = optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        built.compile(chosen, loss, **options)
        return built

    return Trained(model, x, LABELS, balancer={} if proven else {"weight_by": "samples"})


def run(cases) -> None:
    """Prints the outcome of the cases that the command line names, or ``all-but`` of those."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    for name in chosen(cases, sys.argv[1:]):
        result(name, _outcome(strategy, cases[name]))


def _outcome(strategy, case):
    """What a case came to; an error that all workers raise does not end the other cases."""
    try:
        return _compare(strategy, case)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def _compare(strategy, case):
    balancer, model, start, *_ = balanced(strategy, case)
    found = {"state": _state(model)}
    if balancer.rank == 0:
        reference = _alone(case)
        found |= {
            "difference": largest_difference(model, reference),
            "moved": largest_difference(start, reference),
            "reference": _state(reference),
        }
    return found


def _alone(case):
    """The reference: stock Keras in one process, in one fit (its end replaces weights by EMAs)."""
    keras.utils.set_random_seed(1)
    model = case.model(False)
    # Under a strategy, `fit` builds the optimizer before it traces the step. ScheduleFreeAdamW
    # needs that: Keras loses its initial values if it is built while the step is traced.
    model.optimizer.build(model.trainable_variables)
    model.run_eagerly = True  # a trace takes longer than the few steps
    model.fit(_whole_batches(case.x), steps_per_epoch=STEPS, epochs=EPOCHS, verbose=0)
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
    number = lambda value: float(keras.ops.convert_to_numpy(value))  # noqa: E731
    optimizer = model.optimizer
    innermost = getattr(optimizer, "inner_optimizer", optimizer)
    return {
        "digest": hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest(),
        "iterations": number(optimizer.iterations),
        "skipped": EPOCHS * STEPS - number(innermost._iterations),
        "scale": number(getattr(optimizer, "dynamic_scale", 1.0)),
    }
