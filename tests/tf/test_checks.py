"""Checks of Keras and of a model before a fit."""

from contextlib import nullcontext
from importlib import metadata
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from scripts import errors_of

from lbbsp_core.installation import extra
from lbbsp_tf import LoadBalancer
from lbbsp_tf.compat import plain_batch_norm_noticed
from lbbsp_tf.exactness.checks import check_keras, check_model, warn_of_auto_jit

L = keras.layers


@pytest.mark.parametrize(
    ("layer", "notices"),
    [
        (L.BatchNormalization(), [True]),
        (L.BatchNormalization(synchronized=True), []),
        (L.BatchNormalization(trainable=False), []),
        (L.LayerNormalization(), []),
    ],
)
def test_plain_batch_normalisation_is_noticed_where_it_is_trained(layer, notices):
    model = keras.Sequential([L.Input((4,)), layer, L.Dense(1)])
    found = []
    with plain_batch_norm_noticed(lambda: found.append(True)):
        model(tf.ones((3, 4)), training=False)
        model(tf.ones((3, 4)), training=True)
    model(tf.ones((3, 4)), training=True)
    assert found == notices


class OfKeras2:
    """Model of another package, under no strategy."""

    distribute_strategy = tf.distribute.get_strategy()


OfKeras2.__module__ = "tf_keras.src.engine.training"


@pytest.mark.parametrize("wrap", [lambda layer: layer, keras.layers.Bidirectional])
@pytest.mark.parametrize("kind", [keras.layers.GRU, keras.layers.SimpleRNN])
def test_layers_that_fix_the_size_of_a_batch_are_refused_by_name(wrap, kind):
    layers = [wrap(kind(2, stateful=True, name="kept")), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input((3, 4), batch_size=8), *layers])
    model.compile("sgd", "mse")
    words = r"layer '(kept|bidirectional.*)' is stateful, which fixes the size"
    with pytest.raises(ValueError, match=words):
        check_model(model, tf.distribute.get_strategy())
    model = keras.Sequential([keras.layers.Input((3,), batch_size=8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    check_model(model, tf.distribute.get_strategy())  # a size that nothing depends on


@pytest.mark.parametrize(("rank", "device", "count"), [(0, "GPU", 1), (1, "GPU", 0), (0, "CPU", 0)])
def test_only_worker_0_warns_of_compiling_where_tensorflow_does(
    monkeypatch, caplog, rank, device, count
):
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=fusible")
    policy = SimpleNamespace(is_static=False)
    session = SimpleNamespace(rank=rank, balancer=SimpleNamespace(policy=policy))
    devices = (f"/job:worker/replica:0/task:0/device:{device}:0",)
    extended = SimpleNamespace(worker_devices=devices)
    warn_of_auto_jit(session, SimpleNamespace(extended=extended))
    assert len(caplog.records) == count


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            "tensorflow",
            f"tensorflow is not installed: pip install {extra('tf')}, or with tf-cpu in",
        ),
        ("keras", f"keras is not installed: pip install {extra('tf')}"),
        ("jax", "jax, which was chosen as the backend of Keras, is not installed: "),
    ],
)
def test_an_import_that_lacks_a_package_names_the_remedy(module, words):
    script = f"import sys; sys.modules[{module!r}] = None; import lbbsp_tf"
    backend = "jax" if module == "jax" else "tensorflow"
    last = errors_of(script, status=1, KERAS_BACKEND=backend)[-1]
    assert last.startswith(f"ModuleNotFoundError: {words}")


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match=r"must be tensorflow, got jax: set KERAS_BACKEND"):
        check_keras()


@pytest.mark.parametrize(
    ("required", "version", "is_refused"),
    [
        (["keras<3.17,>=3.12.4; python_version < '3.11'", "keras>=3.9.1"], "3.9.0", True),
        (["keras<3.17,>=3.12.4; python_version < '3.11'", "keras>=3.9.1"], "3.10.0", False),
        (["lbbsp[keras]; extra == 'keras'", "numpy>=9", "keras-hub>=9", "keras"], "3.0.0", False),
        (["keras>=3.9.1"], "3.16.0.dev202611210300", False),
        (None, "3.0.0", False),
    ],
)
def test_the_oldest_keras_is_that_of_the_package(monkeypatch, required, version, is_refused):
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    monkeypatch.setattr(keras, "__version__", version)
    with pytest.raises(RuntimeError, match=r"3\.9\.1 or later") if is_refused else nullcontext():
        check_keras()


@pytest.mark.parametrize(
    ("value", "is_refused"),
    [("1", True), ("true", True), ("True", True), ("0", False), ("", False), ("false", False)],
)
def test_legacy_keras_is_refused_for_each_value_that_tensorflow_accepts(
    monkeypatch, value, is_refused
):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", value)
    error = pytest.raises(RuntimeError, match="TF_USE_LEGACY_KERAS")
    with error if is_refused else nullcontext():
        check_keras()


def test_a_model_of_keras_2_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    balancer = LoadBalancer(tf.distribute.get_strategy(), 8)
    with pytest.raises(TypeError, match=r"got a class of tf_keras: build it with .import ker"):
        balancer.set_model(OfKeras2())
