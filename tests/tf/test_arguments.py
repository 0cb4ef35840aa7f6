"""The README's five lines with an argument left out, exchanged, or given by name."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import lbbsp_tf
from lbbsp_core import Limits, LoadBalanced, Narx, Profile
from lbbsp_core.cost.profile_file import write_document

SAMPLES, X = 48, 16
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 4)).astype("f4")
LABELS = rng.integers(0, 2, SAMPLES)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def balancer(*given, **options):
    return lbbsp_tf.LoadBalancer(*(given or (tf.distribute.get_strategy(), X)), **options)


def network(kind=keras.Sequential, loss=LOSS):
    inputs = keras.layers.Input((4,))
    built = kind([inputs, keras.layers.Dense(2)])
    built.compile("sgd", loss)
    return built


def train(data=(FEATURES, LABELS), built=None, left_out=(), **options):
    it, built = balancer(), built or network()
    drawn = it.dataset(*data, **{} if "seed" in left_out else {"seed": 0})
    given = {"steps_per_epoch": it.steps_per_epoch, "epochs": 2, "callbacks": [it]}
    given = {name: value for name, value in given.items() if name not in left_out}
    built.fit(drawn, verbose=0, **given, **options)
    return int(built.optimizer.iterations.numpy())


@pytest.mark.parametrize(
    ("left_out", "epochs"),
    [
        (["seed", "epochs"], 1),
        (["steps_per_epoch"], 2),
        (["callbacks"], 2),
        (["callbacks", "steps_per_epoch"], 2),
    ],
)
def test_in_one_process_each_epoch_has_all_samples_whatever_is_left_out(left_out, epochs):
    assert train(left_out=left_out) == epochs * SAMPLES // X


@pytest.mark.parametrize("data", [(FEATURES,), ((FEATURES, LABELS),)])
def test_a_loss_without_targets_is_refused(data):
    with pytest.raises(ValueError, match=r"the data have no targets y: pass them, as in balancer"):
        train(data)


class WithoutTargets(keras.Sequential):
    """Computes its loss from its own output."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(y_pred**2)


@pytest.mark.parametrize("loss", [LOSS, None])
def test_a_model_that_needs_no_targets_trains_without_them(loss):
    assert train((FEATURES,), network(WithoutTargets, loss)) == 2 * SAMPLES // X


@pytest.mark.parametrize(
    ("given", "error", "problem"),
    [
        ((X, tf.distribute.get_strategy()), TypeError, "strategy must be .*, got 16: write LoadB"),
        ((None, X), TypeError, "strategy must be .*, got None: write LoadBalancer"),
        ((tf.distribute.get_strategy(),), TypeError, "missing 1 .*: 'global_batch_size'"),
        ((tf.distribute.get_strategy(), 16.0), ValueError, "must be an integer >= 0, got 16.0"),
        ((tf.distribute.get_strategy(), "16"), ValueError, "global_batch_size must be an integer"),
    ],
)
def test_wrong_arguments_of_the_balancer_are_named(given, error, problem):
    with pytest.raises(error, match=problem):
        balancer(*given)


def test_an_option_of_keras_or_of_another_trainer_is_named_with_the_right_one():
    with pytest.raises(TypeError, match="batch_size is no option: pass global_batch_size"):
        balancer(batch_size=8)
    with pytest.raises(TypeError, match="sync is an option of asynchronous training"):
        balancer(sync="ssp:3")


@pytest.mark.parametrize("data", [FEATURES, (FEATURES, LABELS)])
def test_a_loop_over_arrays_which_would_train_on_single_samples_is_refused(data):
    with pytest.raises(ValueError, match="a loop needs the data of the balancer"):
        balancer().loop(network().train_step, data)


def test_options_are_taken_by_name(tmp_path):
    points = [{"batch": 8, "seconds": 0.1}, {"batch": 16, "seconds": 0.2}]
    write_document(tmp_path / "gpu.json", {"schema": 1, "points": points})
    named = balancer(
        policy="lbbsp", min_gain=0, predictor="narx", cost=str(tmp_path / "gpu.json"), limits=X
    )
    used = named._session.balancer
    assert used.policy == LoadBalanced(min_gain=0)
    assert used.predictor == Narx(horizon=used.schedule.lag)
    assert used.cost_shape.prior == Profile.load(tmp_path / "gpu.json")
    assert used.constraints.limits == (Limits(),), "a single worker has all samples"
    with pytest.raises(ValueError, match="no policy 'lbsp': did you mean 'lbbsp'"):
        balancer(policy="lbsp")
