"""Cases of batch normalisation, for `exactness`: synchronised on workers, plain in one process."""

import inspect
import tempfile
from pathlib import Path

import keras
from comparison import SAMPLES
from exactness import case, rng, run

import lbbsp_tf

L = keras.layers
IMAGES = rng.normal(size=(SAMPLES, 6, 6, 3))
TOKENS = rng.integers(0, 50, (SAMPLES, 6))  # token 0 is padding
synchronized = lbbsp_tf.synchronize_batch_norm


def block(**options):
    return [L.Conv2D(6, 3), L.BatchNormalization(momentum=0.8, **options), L.ReLU()]


def convolution(**options):
    return keras.Sequential(
        [L.Input((6, 6, 3)), *block(**options), *block(**options), L.Flatten(), L.Dense(3)]
    )


def channels_first():
    norm = L.BatchNormalization(axis=1, momentum=0.8)
    return keras.Sequential(
        [L.Input((6, 6, 3)), L.Permute((3, 1, 2)), norm, L.Flatten(), L.Dense(3)]
    )


def fine_tuned():
    """A frozen base with a new head on top."""
    base = keras.Sequential([L.Input((6, 6, 3)), *block()])
    base.trainable = False
    inputs = L.Input((6, 6, 3))
    hidden = L.BatchNormalization(momentum=0.8)(L.Conv2D(4, 3)(base(inputs)))
    return keras.Model(inputs, L.Dense(3)(L.Flatten()(hidden)))


class Subclassed(keras.Model):
    """Layers in a list, in a dictionary and in a nested model."""

    def __init__(self):
        super().__init__()
        base = keras.Sequential([L.Input((6, 6, 3)), *block()])
        self.blocks = [base, L.BatchNormalization(momentum=0.8)]
        self.head = {"norm": L.BatchNormalization(momentum=0.8), "dense": L.Dense(3)}
        self(keras.ops.zeros((1, 6, 6, 3)))

    def call(self, x, training=None):
        for layer in self.blocks:
            x = layer(x, training=training)
        x = self.head["norm"](keras.ops.mean(x, axis=(1, 2)), training=training)
        return self.head["dense"](x)


def masked():
    return keras.Sequential(
        [L.Input((6,)), L.Embedding(50, 4, mask_zero=True), L.BatchNormalization(momentum=0.8),
         L.GlobalAveragePooling1D(), L.Dense(3)]
    )  # fmt: skip


def over_time():
    norm = L.TimeDistributed(L.BatchNormalization(momentum=0.8))
    return keras.Sequential([L.Input((6, 6, 3)), norm, L.Flatten(), L.Dense(3)])


class NormalizedCell(L.Layer):
    """A recurrent cell that normalises its state in every time step."""

    def __init__(self):
        super().__init__()
        self.state_size, self.dense = 4, L.Dense(4)
        self.norm = L.BatchNormalization(momentum=0.8)

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build((None, 4))

    def call(self, x, states, training=None):
        hidden = self.norm(self.dense(x) + states[0], training=training)
        return hidden, [hidden]


def unrolled_cell():
    steps = L.Reshape((6, 18))
    return keras.Sequential(
        [L.Input((6, 6, 3)), steps, L.RNN(NormalizedCell(), unroll=True), L.Dense(3)]
    )


def from_file(model):
    """Saves a model, and synchronises the one that is loaded; then once more, synchronised."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        model = synchronized(keras.models.load_model(path))
        model.save(path)
        return keras.models.load_model(path)


def _case(build, convert=synchronized, x=IMAGES, dtype="float32", **options):
    return case(build, x=x, dtype=dtype, convert=convert, **options)


CASES = {
    "convolution": _case(convolution, proven=True),
    "channels_first": _case(channels_first),
    "fine_tuned": _case(fine_tuned),
    "subclassed": _case(Subclassed),
    "masked": _case(masked, x=TOKENS),
    "over_time": _case(over_time),
    "unrolled_cell": _case(unrolled_cell),
    "from_file": _case(convolution, convert=from_file),
    "mixed_float16": _case(
        convolution, dtype="mixed_float16", optimizer=lambda: keras.optimizers.SGD(0.05)
    ),
    "accumulation": _case(
        convolution,
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    ),
    "run_eagerly": _case(convolution, run_eagerly=True),
}
if "renorm" in inspect.signature(L.BatchNormalization).parameters:
    limits = {"rmax": 3.0, "rmin": 0.3, "dmax": 5.0}
    CASES["renorm"] = _case(lambda: convolution(renorm=True, renorm_clipping=limits))
run(CASES)
