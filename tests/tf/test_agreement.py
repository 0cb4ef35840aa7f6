"""Facts of models, with collectives of fixed values."""

import runpy

import keras
import numpy as np
import pytest
from keras.src.losses.losses import LossFunctionWrapper

from lbbsp_core import DisagreementError
from lbbsp_core.runtime.exchange import handshake
from lbbsp_core.runtime.exchange.collectives import SingleWorker
from lbbsp_tf.exactness import agreement


class Peers(SingleWorker):
    """Collectives of a worker whose peers always send the same rows."""

    def __init__(self, *rows):
        self.rows = [list(row) for row in rows]

    def all_gather(self, values):
        return [list(values), *self.rows]


def model():
    keras.utils.set_random_seed(0)
    built = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    built.compile(keras.optimizers.SGD(0.1), "mse")
    built.second = {"held": keras.optimizers.Adam(0.2)}
    return built


def test_models_that_agree_pass():
    peer = list(agreement.model_facts(model()).values())
    agreement.check_models(model(), Peers(peer, peer))
    rounded = model()
    rounded.layers[0].kernel.assign(rounded.layers[0].kernel * (1 + 1e-6))  # another processor
    agreement.check_models(rounded, Peers(peer, peer))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m.layers[0].bias.assign([1.0]), "trainable weights"),
        (lambda m: setattr(m.optimizer, "learning_rate", 0.3), "learning rate"),
        (lambda m: setattr(m.second["held"], "learning_rate", 0.3), "learning rate"),
        (lambda m: m.optimizer.iterations.assign(1), "number of updates"),
    ],
)
def test_what_differs_is_named_with_the_ranks(change, name):
    peer, changed = list(agreement.model_facts(model()).values()), model()
    change(changed)
    expected = rf"disagree on the {name} \(worker 0 against workers 1, 2\)"
    with pytest.raises(DisagreementError, match=expected):
        agreement.check_models(changed, Peers(peer, peer))


def test_seeds_metrics_and_frozen_weights_are_not_compared():
    built = model()
    before = agreement.model_facts(built)
    built.evaluate(np.zeros((2, 3)), np.ones((2, 1)), verbose=0)
    assert agreement.model_facts(built) == before


class Follower(Peers):
    """Collectives of a worker whose chief has a model of ones, restored in an epoch or never."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def all_gather(self, values):
        return [[0 if self.epoch is None else 1 + self.epoch], list(values)]

    def broadcast(self, array):
        return np.ones_like(array)


@pytest.mark.parametrize(("own", "chief"), [(None, 0), (3, 2), (2, None), (None, None)])
def test_a_worker_follows_the_chief_if_a_worker_has_restored_a_model(own, chief):
    restored = model()
    restored._initial_epoch = own
    agreement.share_restored_model(restored, Follower(chief))
    assert restored._initial_epoch == chief
    is_shared = np.all(restored.layers[0].kernel.numpy() == 1)
    assert is_shared == ((own, chief) != (None, None))


def compiled(optimizer=None, loss="mse", units=1, rate=0.1):
    built = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(units)])
    inner = optimizer or keras.optimizers.SGD(rate, momentum=0.9)
    built.compile(keras.optimizers.LossScaleOptimizer(inner), loss)
    return built


def decaying(steps):
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, steps, 0.9))


class OwnLoss:
    def __call__(self, y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2)


def test_models_that_were_built_alike_have_the_same_facts_whatever_their_names():
    keras.layers.Dense(1)  # Keras numbers names by process
    keras.optimizers.SGD()
    first = agreement.facts_of(compiled())
    assert agreement.facts_of(compiled()) == first
    assert agreement.facts_of(compiled(rate=0.2)) == first, "a restored model may have another"
    assert "momentum: 0.9" in first["optimizer"]
    own = agreement.facts_of(compiled(decaying(10), OwnLoss()))
    assert agreement.facts_of(compiled(decaying(10), OwnLoss())) == own
    assert "0x" not in own["loss"], "no address"


@pytest.mark.parametrize(
    ("one", "other", "fact"),
    [
        (compiled, lambda: compiled(units=2), "model parameters"),
        (compiled, lambda: compiled(keras.optimizers.SGD(0.1)), "optimizer"),
        (lambda: compiled(decaying(10)), lambda: compiled(decaying(11)), "optimizer"),
        (compiled, lambda: compiled(loss="mae"), "loss"),
        (
            lambda: compiled(loss=keras.losses.Huber()),
            lambda: compiled(loss=keras.losses.Huber(delta=2.0)),
            "loss",
        ),
        (lambda: compiled(loss=OwnLoss()), lambda: compiled(loss=len), "loss"),
    ],
)
def test_facts_of_other_models_differ(one, other, fact):
    assert agreement.facts_of(one())[fact] != agreement.facts_of(other())[fact]


LAMBDA = """
def make(scale):
    return lambda y, p, power=2: scale * (y - p) {} power * (lambda x: x in {{"a", "b"}})("a")
"""


def test_lambdas_agree_wherever_their_files_are(tmp_path, recwarn):
    def loss(folder, scale=3, operator="**"):
        file = tmp_path / folder / "losses.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(LAMBDA.format(operator))
        return LossFunctionWrapper(runpy.run_path(str(file))["make"](scale))

    losses = loss("one"), loss("other"), loss("one", scale=4), loss("one", operator="//")
    one, other, *changed = (agreement.facts_of(compiled(loss=each))["loss"] for each in losses)
    assert one == other not in changed
    assert not [each for each in recwarn if "lambda" in str(each.message)]


def test_learning_rates_are_compared_by_value(monkeypatch):
    agreement.check_learning_rates(compiled(), SingleWorker())
    monkeypatch.setattr(handshake, "gather_bytes", lambda _, data: [data, b"{}"])
    with pytest.raises(DisagreementError, match="disagree on learning rate"):
        agreement.check_learning_rates(compiled(), SingleWorker())
