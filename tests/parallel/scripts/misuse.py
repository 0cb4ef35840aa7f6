"""Every way to misuse the balancer on a cluster; each must raise alike on all workers."""

import fits
import keras
import numpy as np
import tensorflow as tf
from report import answer_all, listening, result

import lbbsp_tf
from lbbsp_core import Ema, Limits, LoadBalanced

x, y = np.zeros((64, 4), "f4"), np.zeros(64, "i4")
strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id


def model(scope=strategy, **options):
    with scope.scope():
        built = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        built.compile("sgd", loss, **options)
    return built


def fit(data=None, built=None, steps="right", balancer=None, **options):
    it = balancer or lbbsp_tf.LoadBalancer(strategy, 16)
    data = it.dataset(x, y) if data is None else data
    steps = it.steps_per_epoch if steps == "right" else steps
    fits.fit(it, built or model(), data, steps_per_epoch=steps, **options)


def fit_arrays(**options):
    it = lbbsp_tf.LoadBalancer(strategy, 16)
    it.dataset(x, y)
    model().fit(x, y, callbacks=[it], verbose=0, **options)


def validate_on_ours():
    it = lbbsp_tf.LoadBalancer(strategy, 16)
    validation = it.dataset(x, y)
    fit(it.dataset(x, y), balancer=it, validation_data=validation, validation_steps=1)


def different(**change):
    options = {"global_batch_size": 16, "seed": 0, "samples": 64} | (change if rank else {})
    samples = options.pop("samples")
    it = lbbsp_tf.LoadBalancer(strategy, **options)
    fit(it.dataset(x[:samples], y[:samples]), balancer=it)


def different_layers():
    kind = keras.layers.ReLU() if rank else keras.layers.Activation("tanh")
    with strategy.scope():
        built = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2), kind])
        built.compile("sgd", "mse")
    fit(built=built)


def schedule(steps):
    return keras.optimizers.schedules.ExponentialDecay(0.1, steps, 0.9)


def different_model(optimizer="sgd", loss=None):
    built = model()
    with strategy.scope():
        built.compile(optimizer, loss or built.loss)
    fit(built=built)


def different_data(x, y):
    it = lbbsp_tf.LoadBalancer(strategy, 16)
    fit(it.dataset(x, y), balancer=it)


def loss_of_rank(y, y_pred):
    """A mean over samples on worker 0, and a sum on worker 1."""
    reduce = keras.ops.sum if rank else keras.ops.mean
    return reduce(keras.losses.sparse_categorical_crossentropy(y, y_pred, True))


class Diverging(keras.callbacks.Callback):
    """Changes the weights of one worker after the second step."""

    def on_train_batch_end(self, batch, logs=None):
        if rank and batch == 1:
            self.model.layers[0].kernel.assign_add(keras.ops.ones((4, 2)))


class Replacing(keras.callbacks.Callback):
    """Makes the train function anew after a step."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.make_train_function(force=True)


def replaced_within_an_epoch():
    it = lbbsp_tf.LoadBalancer(strategy, 16)
    fits.fit(it, model(), it.dataset(x, y), Replacing())


def different_weights():
    it, built = lbbsp_tf.LoadBalancer(strategy, 16, compare_weights=3), model()
    fits.fit(it, built, it.dataset(x, y), Diverging())


def loop(change=None, at=1, built=None):
    """A loop that changes the model or its learning rate on one worker after a step."""
    it, built = lbbsp_tf.LoadBalancer(strategy, 16), built or model()
    with it.loop(built.train_step, it.dataset(x, y)) as steps:
        for step, _ in enumerate(steps.epoch()):
            if step == at:
                change(built)
        for _ in steps.epoch():
            pass


def other_rate(built):
    built.optimizer.learning_rate.assign(0.01 * (1 + rank))


def other_weights(built):
    built.layers[0].kernel.assign_add(rank * keras.ops.ones((4, 2)))


class Fixed(keras.layers.Layer):
    def call(self, x):
        return keras.ops.reshape(keras.ops.reshape(x, (16, 2, 2)), (16, 4))


def of_fixed_size():
    with strategy.scope():
        layers = [Fixed(name="fixed"), keras.layers.Dense(2)]
        built = keras.Sequential([keras.layers.Input((4,)), *layers])
        built.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return built


SAMPLES = np.random.default_rng(0).normal(size=(64, 4)).astype("f4")


def metric_outside_scope():
    metric = keras.metrics.SparseTopKCategoricalAccuracy(name="top")
    fit(built=model(metrics=[metric]))


def no_targets():
    it = lbbsp_tf.LoadBalancer(strategy, 16)
    fit(it.dataset(x), balancer=it)


def names_for_objects():
    """One worker is given names, the other one the objects that they stand for."""
    objects = {
        "policy": LoadBalanced(min_gain=0.0),
        "predictor": Ema(0.5),
        "limits": Limits(1, 12),
    }
    names = {"policy": "lbbsp:min_gain=0", "predictor": "ema0.5", "limits": 12}
    it = lbbsp_tf.LoadBalancer(strategy, 16, **(names if rank else objects))
    fit(it.dataset(x, y), balancer=it)


CASES = {
    "names_for_objects": names_for_objects,
    "no_callbacks": lambda: model().fit(
        lbbsp_tf.LoadBalancer(strategy, 16).dataset(x, y), steps_per_epoch=4, verbose=0
    ),
    "no_targets": no_targets,
    "strategy_left_out": lambda: lbbsp_tf.LoadBalancer(16, strategy),
    "fixed_size": lambda: fit(built=of_fixed_size()),
    "fixed_size_in_loop": lambda: loop(built=of_fixed_size()),
    "metric_outside_scope": metric_outside_scope,
    "no_data_of_ours": lambda: model().fit(
        x, y, callbacks=[lbbsp_tf.LoadBalancer(strategy, 16)], verbose=0
    ),
    "arrays": fit_arrays,
    "batch_size": lambda: fit_arrays(batch_size=8),
    "batch_size_beside_ours": lambda: fit(batch_size=8),
    "replaced_within_an_epoch": replaced_within_an_epoch,
    "validation_split": lambda: fit_arrays(validation_split=0.5),
    "validation_split_of_ours": lambda: fit(validation_split=0.5),
    "wrong_steps": lambda: fit(steps=3),
    "steps_per_execution": lambda: fit(built=model(steps_per_execution=2)),
    "jit_compile": lambda: fit(built=model(jit_compile=True)),
    "validation_of_ours": validate_on_ours,
    "different_logs": lambda: fit(balancer=lbbsp_tf.LoadBalancer(strategy, 16, logs=rank == 0)),
    "different_epochs": lambda: fit(epochs=2 + rank),
    "different_first_epoch": lambda: fit(epochs=3, initial_epoch=rank),
    "outside_scope": lambda: fit(built=model(tf.distribute.get_strategy())),
    "batch_below_workers": lambda: lbbsp_tf.LoadBalancer(strategy, 1),
    "minimum": lambda: lbbsp_tf.LoadBalancer(strategy, 16, limits=Limits(9)),
    "maximum": lambda: lbbsp_tf.LoadBalancer(strategy, 16, limits=Limits(1, 7)),
    "small_data": lambda: fit(lbbsp_tf.LoadBalancer(strategy, 128).dataset(x, y)),
    "lengths": lambda: fit(lbbsp_tf.LoadBalancer(strategy, 16).dataset(x, y[:9])),
    "other_strategy": lambda: lbbsp_tf.LoadBalancer(tf.distribute.get_strategy(), 16),
    "unknown_option": lambda: lbbsp_tf.LoadBalancer(strategy, 16, granularty=8),
    "different_seed": lambda: different(seed=7),
    "different_batch": lambda: different(global_batch_size=8),
    "different_layers": different_layers,
    "different_schedule": lambda: different_model(keras.optimizers.SGD(schedule(9 + rank))),
    "different_loss": lambda: different_model(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=not rank)
    ),
    "different_weighting": lambda: different_model(loss=loss_of_rank),
    "different_order": lambda: different_data(SAMPLES[:: 1 - 2 * rank], y),
    "different_labels": lambda: different_data(SAMPLES, rank * np.arange(64, dtype="i4") % 2),
    "different_types": lambda: different_data(SAMPLES.astype("f8" if rank else "f4"), y),
    "equal_but_rounded": lambda: different_data(SAMPLES * np.float32(1 + 1e-6 * rank), y),
    "different_weights": different_weights,
    "loop_rate": lambda: loop(other_rate),
    "loop_rate_at_the_end": lambda: loop(other_rate, at=3),
    "loop_weights": lambda: loop(other_weights),
    "different_samples": lambda: different(samples=63),
}


result("addresses", listening())
answer_all(CASES)
