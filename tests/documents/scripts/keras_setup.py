"""Names that the documents about Keras use without a definition, for one process."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import lbbsp_core
import lbbsp_tf
from lbbsp_core import Profile
from lbbsp_core.cost.profile_file import write_document

X = 256
keras.utils.set_random_seed(0)
random = np.random.default_rng(0)
x = random.normal(size=(X + 10, 4)).astype("float32")
y = random.normal(size=len(x)).astype("float32")
lengths = random.integers(1, 5, size=len(x))
tokens = tf.ragged.constant([list(range(length)) for length in lengths])
labels = y


fit_as_long_as_asked = keras.Model.fit


def fit(model, *arguments, epochs=1, **options):
    return fit_as_long_as_asked(model, *arguments, epochs=1, **options)  # to save time


keras.Model.fit = fit


class Model(keras.Sequential):
    """A model whose ``compile(...)``, as written in the documents, stands for some arguments."""

    def compile(self, *arguments, **options):
        if arguments == (...,):
            arguments = ("sgd", "mse")
        super().compile(*arguments, **options)


def build():
    return Model([keras.layers.Input((4,)), keras.layers.Dense(1)])


strategy = tf.distribute.MultiWorkerMirroredStrategy()
balancer = lbbsp_tf.LoadBalancer(strategy, X)
with strategy.scope():
    model = build()
    model.compile(...)
points = [{"batch": batch, "seconds": 0.1 + 0.001 * batch} for batch in (1, 2, 4, 300)]
write_document(Path("gpu.json"), {"schema": 1, "points": points})
