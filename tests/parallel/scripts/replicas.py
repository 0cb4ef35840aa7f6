"""Several replicas in a process: uneven, changing batches, against one process on whole batches."""

import json
import os
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf
from comparison import PLANS, SAMPLES, Trained, Watch, X, balanced, compare
from fits import fit
from report import chosen, result
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from virtual_time import VirtualTime

import lbbsp_tf
from lbbsp_core import LoadBalanced
from lbbsp_core.testing import ChangingPlans

L = keras.layers
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 10)).astype("f4")
TARGETS = rng.normal(size=(SAMPLES, 1)).astype("f4")
DEVICES = 2


def dense(distributed):
    inputs = L.Input((10,))
    hidden = L.Dense(16, activation="tanh", kernel_regularizer="l2")(inputs)
    model = keras.Model(inputs, L.Dense(1)(hidden))
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5), "mse", metrics=["mae"]
    )
    return model


def scalar_loss(distributed):
    model = dense(distributed)
    model.compile("adam", lambda y, y_pred: tf.reduce_mean(tf.square(y - y_pred)))
    return model


def normalised(distributed):
    model = keras.Sequential(
        [L.Input((10,)), L.Dense(16), L.BatchNormalization(synchronized=distributed), L.ReLU(),
         L.Dense(1)]
    )  # fmt: skip
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def half(distributed):
    model = dense(distributed)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=64.0)
    model.compile(scaled, "mse")
    return model


CLOCKS = []  # of the devices


class Clocks(Watch):
    """Gives each device a clock of its own."""

    def __init__(self, balancer):
        super().__init__(balancer)
        CLOCKS.extend(VirtualTime(session.meter) for session in balancer._training.sessions)


class Unequal(keras.Model):
    """Takes 1 ms a sample on the first device, and 3 ms on the second, in the forward pass."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, training=False):
        return self.dense(self.compute(x) if training else x)

    def compute(self, x):
        replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)

        def compute(batch):
            CLOCKS[replica].compute((0.001, 0.003)[replica] * len(batch))
            return batch

        computed = tf.numpy_function(compute, [x], tf.float32)
        return x + tf.stop_gradient(tf.ensure_shape(computed, x.shape) - x)


def unequal(distributed):
    model = Unequal()
    model.compile("sgd", "mse")
    return model


def accumulating(distributed):
    model = dense(distributed)
    optimizer = keras.optimizers.SGD(
        0.05, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3
    )
    model.compile(optimizer, "mse")
    return model


class OwnLogs(keras.Model):
    """A train step that also returns a tensor of its batch."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"spread": tf.reduce_mean(tf.square(data[1]))}


def own_logs(distributed):
    inputs = L.Input((10,))
    model = OwnLogs(inputs, L.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


CASES = {
    "own_logs": Trained(own_logs, FEATURES, TARGETS),
    "accumulation_ema": Trained(accumulating, FEATURES, TARGETS),
    "dense": Trained(dense, FEATURES, TARGETS),
    "scalar_loss": Trained(scalar_loss, FEATURES, TARGETS),
    "loss_scaling": Trained(half, FEATURES, TARGETS),
    "synchronized_batch_norm": Trained(normalised, FEATURES, TARGETS),
    "prefetch": Trained(dense, FEATURES, TARGETS, data={"prefetch": 2}),
    "by_work": Trained(
        dense, FEATURES, TARGETS, data={"prefetch": 1, "work": rng.lognormal(size=SAMPLES)}
    ),
    "verified": Trained(dense, FEATURES, TARGETS, balancer={"verify": True}),
    "shares_no_work": Trained(dense, FEATURES, TARGETS, balancer={"share_work": "auto"}),
}


# Inputs that all replicas of a process read together: how often is each sample trained on?

COUNTED = 10 * X
NUMBERS = np.arange(COUNTED)
FOLDER = tempfile.TemporaryDirectory()


class Reshuffled(keras.utils.PyDataset):
    """Global batches with a new order of the samples in each pass."""

    order, passes = NUMBERS, 0

    def __len__(self):
        return COUNTED // X

    def __getitem__(self, index):
        numbers = self.order[index * X : (index + 1) * X]
        return numbers[:, None], numbers

    def on_epoch_end(self):
        self.passes += 1
        self.order = np.random.default_rng(self.passes).permutation(COUNTED)


def shuffled():
    numbered = tf.data.Dataset.from_tensor_slices((NUMBERS[:, None], NUMBERS))
    return numbered.shuffle(50, seed=3)


def cached():
    return shuffled().cache(os.path.join(FOLDER.name, "cache"))


def words():
    texts = tf.ragged.constant([[str(i)] * (1 + i % 3) for i in NUMBERS])
    return tf.data.Dataset.from_tensor_slices((texts, NUMBERS)).shuffle(50, seed=3).batch(7)


def number(words, y):
    return tf.strings.to_number(words[:1], tf.int64), y


COUNTS = {
    "shuffled_stream": lambda: (shuffled(), {"prefetch": 2}),
    "stream_that_is_not_read_ahead": lambda: (shuffled(), {"prefetch": 0}),
    "cached_stream": lambda: (cached(), {}),
    "stream_of_words": lambda: (words(), {"map": number}),
    "reshuffled_items": lambda: (Reshuffled(), {"prefetch": 2}),
}


def count(strategy, name):
    """How often each sample is trained on in two fits of one and two epochs, as (least, most)."""
    data, options = COUNTS[name]()
    with strategy.scope():
        model = keras.Sequential([L.Input((1,), dtype="int64"), L.Embedding(COUNTED, 1, "zeros")])
        # Each time that a sample is trained on lowers its number by one.
        model.compile(keras.optimizers.SGD(float(X)), lambda y, y_pred: tf.reduce_mean(y_pred))
    balancer = lbbsp_tf.LoadBalancer(
        strategy, X, policy=ChangingPlans(PLANS[strategy.num_replicas_in_sync]), seed=0
    )
    data = balancer.dataset(data, **options)
    for first, last in ((0, 1), (1, 3)):
        fit(balancer, model, data, initial_epoch=first, epochs=last)
    counts = -model.get_weights()[0]
    result(name, [float(counts.min()), float(counts.max())])


def logical_devices(count=DEVICES):
    """Splits the CPU into devices, and lets the workers' strategy use all of them."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )

    def local_devices(self, cluster_resolver, worker_device):
        return tuple(f"{worker_device}/device:CPU:{i}" for i in range(count)), "CPU"

    CollectiveAllReduceExtended._initialize_local_devices = local_devices


if __name__ == "__main__":
    kind, *names = sys.argv[1:]
    if kind == "unequal_workers":
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        logical_devices(count=2 - rank)
        try:
            lbbsp_tf.LoadBalancer(tf.distribute.MultiWorkerMirroredStrategy(), 64)
        except ValueError as error:
            result(kind, str(error))
        sys.exit()
    logical_devices()
    if kind == "mirrored":
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(DEVICES)])
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    for name in chosen([*CASES, *COUNTS], names):
        if name == "unequal":
            case = Trained(unequal, FEATURES, TARGETS)
            balancer, *_ = balanced(strategy, case, LoadBalanced(min_gain=0.0), Clocks)
            result(name, balancer.sizes)
        elif name in COUNTS:
            count(strategy, name)
        else:
            compare(name, strategy, CASES[name])
