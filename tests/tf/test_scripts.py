"""Scripts with processes of their own, which share one import of TensorFlow."""

import json
from importlib.util import find_spec

import pytest
from scripts import closed_addresses, errors_of, in_forks
from waits import until

from lbbsp_tf.reliability import _start_watch

PRELUDE = """
import os

import keras
import numpy as np
import tensorflow as tf
devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
import lbbsp_tf
keras.utils.set_random_seed(0)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
"""
TWO_DEVICES = """
os.environ["TF_XLA_FLAGS"] = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"
balancer = lbbsp_tf.LoadBalancer(strategy, 8)
lbbsp_tf.LoadBalancer(strategy, 8, policy="bsp")
del os.environ["TF_XLA_FLAGS"]  # TensorFlow has not read it

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def predict_step(self, data):
        assert data[0].shape.rank == 2 and not tf.executing_eagerly()
        return super().predict_step(data)

    def test_step(self, data):
        return {"error": tf.reduce_mean((self(data[0]) - data[1]) ** 2)}

with strategy.scope():
    model = Model()
    model.compile("sgd", "mse")
x, y = np.random.rand(16, 3).astype("float32"), np.ones((16, 1), "float32")
predicted = model.predict_on_batch(x)
np.testing.assert_allclose(predicted, model(x), rtol=1e-5)
found = model.evaluate(x[:7], y[:7], batch_size=3, verbose=0, return_dict=True)
np.testing.assert_allclose(found["error"], np.mean((predicted[6] - 1) ** 2), rtol=1e-5)
model.fit(balancer.dataset(x, y), steps_per_epoch=2, callbacks=[balancer], verbose=0)
"""
LOOPS = """
x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
y = x.sum(axis=1, keepdims=True)

def said(call):
    try:
        call()
    except ValueError as error:
        return str(error)

def seen(strategy):
    keras.utils.set_random_seed(0)
    balancer = lbbsp_tf.LoadBalancer(strategy, 8)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def loop():
        return balancer.loop(model.train_step, balancer.dataset(x, y, shuffle=False))

    def steps(of, stop_after=None):
        count = 0
        for _ in of.epoch():
            count += 1
            if count == stop_after:
                of.request_stop()
        return count

    found = []
    with loop() as first:
        found += [steps(first, stop_after=3), steps(first)]
    with loop() as second:
        found.append(steps(second))
        for _ in second.epoch():
            break
        found.append(said(lambda: steps(second)))
    with loop() as third, loop() as fourth:
        epoch = fourth.epoch()
        next(epoch)
        found.append(said(lambda: steps(third)))
        found.append(1 + len(list(epoch)))
        fourth.request_stop()
    with loop() as last:
        found.append(steps(last))
    found.append(said(lambda: steps(last)))
    model.fit(balancer.dataset(x, y), steps_per_epoch=8, callbacks=[balancer], verbose=0)
    found.append(said(lambda: steps(last)))
    return found, model.get_weights()

(alone, expected), (together, weights) = map(seen, (tf.distribute.get_strategy(), strategy))
assert alone == together, (alone, together)
left, ended = "the epoch before was left before", "the loop was closed, or another "
expects = ["4", "0", "8", left, ended, "8", "8", ended, ended]
assert [str(each)[:32] for each in alone] == expects, alone
for ours, each in zip(weights, expected):
    np.testing.assert_allclose(ours, each, atol=1e-5)
"""
DETERMINISM = """
tf.config.experimental.enable_op_determinism()
with strategy.scope():
    layers = keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
balancer = lbbsp_tf.LoadBalancer(strategy, 8)
x, y = np.ones((24, 3), "float32"), np.ones((24, 1), "float32")
model.fit(balancer.dataset(x, y), steps_per_epoch=3, callbacks=[balancer], verbose=0)
assert model.optimizer.iterations == 3
"""
OWN_PENALTY = """
x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
y = x[:, :1]

class Model(keras.Model):
    def __init__(self, divides):
        super().__init__()
        self.dense, self.divides = keras.layers.Dense(1), divides

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            penalty = 9 * tf.reduce_sum(self.dense.kernel ** 2)
            if self.divides:
                penalty /= strategy.num_replicas_in_sync
            loss = tf.reduce_sum((self(x) - y) ** 2) + penalty
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

def fit(divides):
    with strategy.scope():
        model = Model(divides)
        model(x[:1])
        model.compile(keras.optimizers.SGD(1e-3))
    balancer = lbbsp_tf.LoadBalancer(strategy, 8)
    model.fit(balancer.dataset(x, y), steps_per_epoch=3, callbacks=[balancer], verbose=0)

fit(True)
try:
    fit(False)
except ValueError as error:
    print(error)
"""
LEGACY_KERAS = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import lbbsp_tf
import tensorflow as tf
lbbsp_tf.LoadBalancer(tf.distribute.get_strategy(), 8)
"""
WITHOUT_STRATEGY = """
import os, sys
os.environ["TF_CONFIG"] = {!r}
import lbbsp_tf
{}
"""
BOTH_FRAMEWORKS = """
import lbbsp_tf, lbbsp_mx
import mxnet as mx
import tensorflow as tf
x = mx.nd.ones((4, 2))
x.attach_grad()
with mx.autograd.record(): y = (x * x).sum()
y.backward()
assert (x.grad.asnumpy() == 2).all()
v = tf.Variable([3.0])
with tf.GradientTape() as tape: loss = v * v
assert tape.gradient(loss, v).numpy() == [6.0]
"""

HAS_MXNET = find_spec("mxnet") is not None
needs_mxnet = pytest.mark.skipif(not HAS_MXNET, reason="no MXNet for this Python")


@pytest.fixture(scope="module")
def closed():
    return closed_addresses()


def without_strategy(address, end):
    cluster = {"worker": [address, "127.0.0.1:9"]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    return WITHOUT_STRATEGY.format(json.dumps(task), end)


@pytest.fixture(scope="module")
def ended(tmp_path_factory, closed):
    """How each script has ended."""
    scripts = {
        "two devices": PRELUDE + TWO_DEVICES,
        "loops": PRELUDE + LOOPS,
        "determinism": PRELUDE + DETERMINISM,
        "own penalty": PRELUDE + OWN_PENALTY,
        "legacy Keras": LEGACY_KERAS,
        "ends": without_strategy(closed[0], ""),
        "exits": without_strategy(closed[1], "os._exit(0)"),
    }
    if HAS_MXNET:
        scripts["both frameworks"] = BOTH_FRAMEWORKS
    return in_forks(tmp_path_factory.mktemp("scripts"), scripts)


def test_two_replicas_predict_a_batch_in_a_graph_and_evaluate_a_last_batch_of_one_row(ended):
    assert ended["two devices"].status == 0, ended["two devices"].said


def test_compiling_each_batch_size_anew_is_warned_of_where_sizes_change(ended):
    lines = ended["two devices"].said.splitlines()
    assert [line for line in lines if "TF_XLA_FLAGS" in line] == [
        "TF_XLA_FLAGS has --tf_xla_auto_jit=2: XLA compiles the step anew for each new batch size: "
        "unset TF_XLA_FLAGS, or keep the sizes few (granularity=, interval= of the balancer)"
    ]


def test_loops_stop_break_and_follow_each_other_alike_in_one_process_and_on_devices(ended):
    assert ended["loops"].status == 0, ended["loops"].said


def test_a_penalty_in_a_sum_must_be_divided_among_replicas(ended):
    status, said = ended["own penalty"]
    assert status == 0, said
    assert "a sum over samples and of a term without samples" in said
    assert "or let the step divide the term by strategy.num_replicas_in_sync" in said


def test_operations_may_be_deterministic(ended):
    assert ended["determinism"].status == 0, ended["determinism"].said


def test_a_script_that_runs_with_legacy_keras_ends_with_the_remedy(ended):
    status, said = ended["legacy Keras"]
    last = said.splitlines()[-1]
    assert status == 1
    assert last.startswith("RuntimeError: TF_USE_LEGACY_KERAS makes tf.keras Keras 2")
    assert "remove TF_USE_LEGACY_KERAS from the environment" in last


@pytest.mark.parametrize("name", ["ends", "exits"])
def test_a_script_that_ends_without_a_strategy_has_failed(ended, closed, name):
    assert ended[name].status == 0, ended[name].said
    address = closed[name == "exits"]
    until(lambda: _start_watch.probe(address, 0) == _start_watch.FAILED)


@needs_mxnet
def test_both_frameworks_train_in_one_process(ended):
    assert ended["both frameworks"].status == 0, ended["both frameworks"].said


@needs_mxnet
@pytest.mark.campaign
def test_both_frameworks_train_in_one_process_if_mxnet_is_the_first():
    errors_of("import lbbsp_mx, mxnet" + BOTH_FRAMEWORKS)
