"""Trains a case on uneven, changing batches, and then in one process on the whole batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import keras
import numpy as np
from fits import fit
from report import largest_difference, result
from virtual_time import Unequal

import lbbsp_tf
from lbbsp_core.testing import ChangingPlans

X = 64
SAMPLES = 5 * X + 21  # a short last batch in every epoch
EPOCHS = 2
BALANCERS = []  # that have been made, for steps that call the last one
PLANS = {
    1: ((64,),),
    2: ((48, 16), (40, 24), (7, 57)),
    3: ((40, 16, 8), (30, 31, 3), (1, 20, 43)),
    4: ((30, 16, 10, 8), (20, 21, 20, 3), (1, 20, 40, 3)),
}


@dataclass
class Trained:
    """A way to train: a compiled model, and what to feed."""

    model: Callable[[bool], keras.Model]  # called with whether it is to be distributed
    x: object
    y: object = None
    weights: object = None
    epochs: int = EPOCHS
    balancer: Mapping[str, object] = field(default_factory=dict)
    data: Mapping[str, object] = field(default_factory=dict)
    fit: Mapping[str, object] = field(default_factory=dict)
    callbacks: Sequence[keras.callbacks.Callback] = ()
    by_loop: bool = False  # a custom loop over train_step instead of fit


class Watch(keras.callbacks.Callback):
    """Keeps the plans."""

    def __init__(self, balancer):
        super().__init__()
        self.balancer, self.plans = balancer, set()

    def on_train_batch_begin(self, batch, logs=None):
        self.plans.add(self.balancer.sizes)


class Slow(Watch):
    """Makes the first worker three times as slow as the others."""

    def __init__(self, balancer):
        super().__init__(balancer)
        session = balancer._session
        self.compute = Unequal(session, (0.003, *[0.001] * (session.workers - 1)))

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch)
        self.compute()


def balanced(strategy, case, policy=None, watch=Watch):
    """Returns the balancer, the model, its first weights, the plans and its history."""
    options = {
        "policy": policy or ChangingPlans(PLANS[strategy.num_replicas_in_sync]),
        **case.balancer,
    }
    balancer = lbbsp_tf.LoadBalancer(strategy, X, **options)
    BALANCERS.append(balancer)
    watch = watch(balancer)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = case.model(True)
    start = [w.copy() for w in model.get_weights()]
    data = balancer.dataset(case.x, case.y, case.weights, seed=0, **case.data)
    if case.by_loop:
        with balancer.loop(model.train_step, data) as loop:
            for _ in range(case.epochs):
                for _ in loop.epoch():
                    watch.plans.add(balancer.sizes)
        return balancer, model, start, watch.plans, {}
    fitted = fit(balancer, model, data, watch, *case.callbacks, epochs=case.epochs, **case.fit)
    return balancer, model, start, watch.plans, fitted.history


def alone(case, samples=SAMPLES, mapped=lambda x: x):
    """The reference: stock Keras in one process, on whole batches of the documented order."""
    keras.utils.set_random_seed(1)
    model, history = case.model(False), []
    # A trace takes longer than the few steps. But eager steps weight the logged losses of several
    # outputs by the samples of a batch, and traced ones do not.
    model.run_eagerly = not isinstance(case.y, tuple)
    for epoch in range(case.epochs):
        order = np.random.default_rng((0, epoch)).permutation(samples)
        take = lambda data: keras.tree.map_structure(lambda a: a[order], data)  # noqa: B023, E731
        weights = None if case.weights is None else take(case.weights)
        y = None if case.y is None else take(case.y)
        fitted = model.fit(mapped(take(case.x)), y, sample_weight=weights, batch_size=X, verbose=0,
                           shuffle=False, callbacks=[*case.callbacks], **case.fit)  # fmt: skip
        history.append({name: values[0] for name, values in fitted.history.items()})
    return model, history


def compare(name, strategy, case, policy=None, **reference):
    """Trains both ways, and prints how far the results are apart."""
    watch = Slow if policy else Watch
    balancer, model, start, plans, fitted = balanced(strategy, case, policy, watch)
    if balancer.rank:
        return
    other, history = alone(case, **reference)
    logs = [
        (fitted[key][epoch], history[epoch][key])
        for epoch in range(case.epochs)
        for key in history[epoch]
        if fitted
    ]
    result(name, {
        "difference": largest_difference(model, other),
        "moved": largest_difference(start, other),
        "logs": max((abs(a - b) for a, b in logs), default=0.0),
        "relative_logs": max((abs(a - b) / (abs(b) or 1.0) for a, b in logs), default=0.0),
        "plans": len(plans),
    })  # fmt: skip
