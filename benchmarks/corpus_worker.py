"""Runs one edited script of the corpus in one process: fake data, small fits, recorded weights.

What is random for each sample is made the same for all samples: no dropout, no augmentation, one
noise vector. Weights and data are float64, so that differences are those of the mathematics.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import random
import runpy
import sys
from pathlib import Path

os.environ |= {"KERAS_BACKEND": "tensorflow", "MPLBACKEND": "Agg", "TF_CPP_MIN_LOG_LEVEL": "3"}
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import corpus_data
import keras
import numpy as np
import tensorflow as tf
from corpus_process import report, stand_in

import lbbsp_tf
from lbbsp_core.testing import ChangingPlans

EPOCHS = 2
SHARES = (0.75, 0.6, 0.1)  # of the first worker, in turn
ABSENT = ("imageio", "IPython", "IPython.display", "ipywidgets", "seaborn", "tensorflow_docs",
          "tensorflow_docs.vis", "tqdm")  # fmt: skip


def uneven_plans(global_batch_size: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Returns plans that give the first worker a changing share, and the others equal ones."""
    plans = []
    for share in SHARES:
        first = min(max(1, round(global_batch_size * share)), global_batch_size - workers + 1)
        each, over = divmod(global_batch_size - first, workers - 1)
        plans.append((first, *(each + (rank < over) for rank in range(workers - 1))))
    return tuple(plans)


class Recorder(keras.callbacks.Callback):
    """Weights with which a fit starts; they may not exist before."""

    def on_train_begin(self, logs=None):
        """Keeps the initial weights."""
        self.start = _weights(self.model)


def _weights(model: keras.Model) -> list[np.ndarray]:
    values = [np.asarray(w) for w in model.get_weights()]
    return [np.array(value, np.float64) for value in values if value.dtype.kind == "f"]


def record_fits(output: Path) -> None:
    """Limits every fit to a few epochs; saves the weights and logs of those with a balancer."""
    trainer = keras.src.backend.tensorflow.trainer.TensorFlowTrainer
    fit, saved = trainer.fit, {}

    @functools.wraps(fit)
    def recorded(model, *args, **options):
        options["epochs"] = min(options.get("epochs", 1), options.get("initial_epoch", 0) + EPOCHS)
        callbacks = options.get("callbacks") or []
        callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        balanced = any(isinstance(c, lbbsp_tf.LoadBalancer) for c in callbacks)
        recorder = Recorder()
        history = fit(model, *args, **options | {"callbacks": [*callbacks, recorder]})
        if balanced:
            fit_number = sum(key.endswith("_start_0") for key in saved)
            for when, weights in (("start", recorder.start), ("end", _weights(model))):
                saved.update({f"{fit_number}_{when}_{n}": w for n, w in enumerate(weights)})
            for name, values in history.history.items():
                saved[f"{fit_number}_log_{name}"] = np.asarray(values, np.float64)
            np.savez(output, **saved)
            keras.utils.set_random_seed(fit_number + 1)  # the next model starts alike
        return history

    trainer.fit = recorded


def force_plans() -> None:
    """Gives every balancer uneven, changing plans."""
    create = lbbsp_tf.LoadBalancer.__init__

    def forced(self, strategy, global_batch_size, **options):
        workers = strategy.num_replicas_in_sync
        if workers > 1:
            options["policy"] = ChangingPlans(uneven_plans(global_batch_size, workers))
        create(self, strategy, global_batch_size, **options)

    lbbsp_tf.LoadBalancer.__init__ = forced


def without_randomness() -> None:
    """Makes random numbers the same for all samples, and augmentation layers the identity."""
    backend = keras.src.backend.random
    backend.dropout = lambda inputs, rate, noise_shape=None, seed=None: inputs
    # `import tensorflow.random` makes a second module of the same functions
    for module in (backend, tf.random, importlib.import_module("tensorflow.random")):
        for name in ("normal", "uniform", "truncated_normal", "gamma"):
            if hasattr(module, name):
                setattr(module, name, _same_for_all(getattr(module, name)))
    in_top_k = tf.math.in_top_k  # takes float32 only
    tf.math.in_top_k = lambda targets, predictions, k, name=None: in_top_k(
        targets, tf.cast(predictions, tf.float32), k, name
    )
    for name in dir(keras.layers):
        if name.startswith("Random") and name != "RandomCrop":
            getattr(keras.layers, name).call = lambda self, inputs, training=None: inputs
    shuffle = tf.data.Dataset.shuffle  # one order, however often a data set is read
    tf.data.Dataset.shuffle = lambda self, buffer_size, seed=None, **options: shuffle(
        self, buffer_size, seed=seed, reshuffle_each_iteration=False
    )
    keras.layers.GaussianNoise.call = lambda self, inputs, training=False: inputs
    # Noise that is the same for all samples is normalised to 0, where activations have a kink.
    create = keras.layers.BatchNormalization.__init__
    off_0 = keras.initializers.Constant(0.1)
    parameters = list(inspect.signature(create).parameters)[1:]
    defaults = dict(zip(parameters, create.__defaults__, strict=False))
    create.__defaults__ = tuple({**defaults, "beta_initializer": off_0}.values())


def _same_for_all(sample):
    """Returns a sampler that draws one sample where the number of samples is not static."""

    @functools.wraps(sample)
    def fixed(shape, *args, **options):
        shape = shape if tf.is_tensor(shape) else tuple(shape)
        if len(args) < 3:  # the type is the fourth argument
            options.setdefault("dtype", keras.config.floatx())
        dynamic = tf.is_tensor(shape) or any(tf.is_tensor(n) or n is None for n in shape)
        if tf.executing_eagerly() or not dynamic:
            return sample(shape, *args, **options)
        shape = tf.convert_to_tensor(shape)
        with tf.init_scope():
            one = np.random.default_rng(5).uniform(0.1, 0.9, 4096)
        values = tf.constant(one, args[2] if len(args) > 2 else options["dtype"])
        count = tf.reduce_prod(shape[1:])
        repeated = tf.tile(values, [count // 4096 + 1])[:count]
        return tf.broadcast_to(tf.reshape(repeated, shape[1:]), shape)

    return fixed


def stand_in_for_absent_modules() -> None:
    """Replaces packages for plots, downloads and animations by objects that accept any call."""
    stand_in(ABSENT)
    sys.modules["IPython"].version_info = (9, 0)  # matplotlib asks for it
    sys.modules["IPython"].get_ipython = lambda: None


def silence() -> None:
    """Keeps no pictures."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    plt.show = lambda *args, **options: plt.close("all")
    keras.utils.plot_model = lambda *args, **options: None


def without_downloads() -> None:
    """Takes random initial weights instead of published ones."""
    for name, build in list(vars(keras.applications).items()):
        if callable(build):
            setattr(keras.applications, name, _untrained(build))


def _untrained(build):
    @functools.wraps(build)
    def untrained(*args, **options):
        return build(*args, **options | {"weights": None})

    return untrained


def main(script: Path, output: Path, recipe: str) -> None:
    """Runs a script in its own folder."""
    keras.config.set_floatx("float64")
    keras.config.disable_traceback_filtering()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    silence()
    stand_in_for_absent_modules()
    without_randomness()
    without_downloads()
    force_plans()
    record_fits(output)
    os.chdir(output.parent)
    corpus_data.prepare(recipe)
    random.seed(0)
    keras.utils.set_random_seed(0)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException as error:
        report(error)
        raise
    report(None)


if __name__ == "__main__":
    folder = Path(sys.argv[2]).resolve()
    rank = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    place = folder / f"rank{rank}"
    place.mkdir(parents=True, exist_ok=True)
    main(Path(sys.argv[1]).resolve(), place / "fits.npz", sys.argv[3])
