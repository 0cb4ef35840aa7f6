"""Training step of a small Keras CNN on handwritten digits, for ``lbbsp profile``.

lbbsp profile examples/profile_keras.py -o profile.json --plot profile.html
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
images = np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))).astype("float32")[..., None] / 16
rng = np.random.default_rng(0)

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.layers.Input((24, 24, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(4),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy")


def step(batch_size):
    """Runs the local work of a worker in one iteration: draw a batch, forward, backward, update."""
    drawn = rng.integers(len(images), size=batch_size)
    model.train_on_batch(images[drawn], labels[drawn])
