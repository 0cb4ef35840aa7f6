"""Two devices of one process, in a process of their own."""

import pytest
from scripts import errors_of

SCRIPT = """
import os

import keras
import numpy as np
import tensorflow as tf
devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
import lbbsp_tf
keras.utils.set_random_seed(0)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
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


@pytest.fixture(scope="module")
def said():
    """Lines of the script, which has ended well."""
    return errors_of(SCRIPT)


@pytest.mark.usefixtures("said")
def test_two_replicas_predict_a_batch_in_a_graph_and_evaluate_a_last_batch_of_one_row():
    """As the script asserts."""


def test_compiling_each_batch_size_anew_is_warned_of_where_sizes_change(said):
    [warning] = [line for line in said if "TF_XLA_FLAGS" in line]
    assert warning == (
        "TF_XLA_FLAGS has --tf_xla_auto_jit=2: XLA compiles the step anew for each new batch size: "
        "unset TF_XLA_FLAGS, or keep the sizes few (granularity=, interval= of the balancer)"
    )
