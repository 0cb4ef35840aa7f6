"""On one worker the same script trains as stock Keras does."""

import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import lbbsp_tf

SAMPLES, X = 50, 16
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 4)).astype("f4")
LABELS = rng.integers(0, 2, SAMPLES)


def model():
    keras.utils.set_random_seed(0)
    built = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(keras.optimizers.SGD(0.1), loss)
    return built


@pytest.fixture
def balancer(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return lbbsp_tf.LoadBalancer(tf.distribute.get_strategy(), X)


def fit(balancer, data, built=None, **options):
    built = built or model()
    options = {"steps_per_epoch": balancer.steps_per_epoch, **options}
    built.fit(data, callbacks=[balancer], verbose=0, **options)
    return built


def test_it_is_passive_under_a_strategy_with_one_device(caplog):
    strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
    balancer = lbbsp_tf.LoadBalancer(strategy, X)
    assert not balancer.active
    with strategy.scope():
        built = model()
    fit(balancer, balancer.dataset(FEATURES, LABELS), built)
    said = [record.message for record in caplog.records if record.name.startswith("lbbsp")]
    assert said == ["LoadBalancer is passive, because there is only one replica"]


def test_it_learns_what_stock_keras_learns_from_the_same_order(balancer):
    options = {"class_weight": {0: 0.1, 1: 2.0}}
    data = balancer.dataset(FEATURES, LABELS, seed=5)
    balanced = fit(balancer, data, epochs=1, **options)
    fit(balancer, data, balanced, initial_epoch=1, epochs=2, **options)
    stock = model()
    for epoch in range(2):
        order = np.random.default_rng((5, epoch)).permutation(SAMPLES)
        stock.fit(FEATURES[order], LABELS[order], batch_size=X, shuffle=False, verbose=0, **options)
    for ours, theirs in zip(balanced.get_weights(), stock.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_keras_does_not_warn_that_it_ignores_shuffle(balancer, recwarn):
    fit(balancer, balancer.dataset(FEATURES, LABELS))
    assert not [str(each.message) for each in recwarn if "shuffle" in str(each.message)]
    if keras.__version__.startswith("3.12."):
        return  # stock Keras 3.12 does not warn here
    model().fit(tf.data.Dataset.from_tensors((FEATURES, LABELS)), verbose=0)  # as stock Keras
    assert [each for each in recwarn if "`shuffle=True`" in str(each.message)]


@pytest.mark.parametrize(("verbose", "terminal"), [("auto", False), (1, False), (1, True)])
def test_a_file_gets_a_line_for_each_epoch_and_no_bar(
    balancer, monkeypatch, capsys, verbose, terminal
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    data, built = balancer.dataset(FEATURES, LABELS), model()
    steps = {"steps_per_epoch": balancer.steps_per_epoch, "epochs": 2}
    built.fit(data, callbacks=[balancer], verbose=verbose, **steps)
    built.evaluate(FEATURES, LABELS, verbose=verbose)
    said = capsys.readouterr().out
    assert ("\r" in said) == ("\x1b" in said) == terminal
    if not terminal:
        first, line, second, *others = said.splitlines()
        assert (first, second) == ("Epoch 1/2", "Epoch 2/2")
        assert line.startswith("4/4 - ")
        assert len(others) == 2, "the second epoch, and the evaluation"


@pytest.mark.parametrize(("rank", "asked", "verbose"), [(0, "", 2), (1, "", 0), (1, "all", 2)])
def test_worker_0_prints_the_progress_unless_all_are_to(monkeypatch, rank, asked, verbose):
    monkeypatch.setenv("LBBSP_PROGRESS", asked)
    logger = keras.callbacks.ProgbarLogger()
    extended = SimpleNamespace(should_save_summary=rank == 0)
    logger.set_model(SimpleNamespace(distribute_strategy=SimpleNamespace(extended=extended)))
    logger.set_params({"verbose": 2, "epochs": 1, "steps": 4})
    assert logger.verbose == verbose


def test_the_output_may_be_any_object_with_write(monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=print, flush=print))
    logger = keras.callbacks.ProgbarLogger()
    logger.set_params({"verbose": 1, "epochs": 1, "steps": 4})
    assert logger.verbose == 2


class Halves(keras.utils.PyDataset):
    """Two batches, and an attribute that has another meaning here."""

    steps_per_epoch = 1
    example = pipeline = "ours"

    def __len__(self):
        return 2

    def __getitem__(self, index):
        half = slice(index, None, 2)
        return FEATURES[half], LABELS[half]


def test_data_of_others_stay_as_they_are(balancer):
    built = model()
    expected = built.evaluate(FEATURES, LABELS, verbose=0)
    np.testing.assert_allclose(built.evaluate(Halves(), verbose=0), expected, rtol=1e-5)


def test_a_split_of_its_own_data_set_is_made_by_the_balancer(balancer):
    data = balancer.dataset(FEATURES, LABELS)
    with pytest.raises(ValueError, match=r"balancer\.dataset\(\.\.\., validation_split=0\.25\)"):
        fit(balancer, data, validation_split=0.25)
    assert model().fit(FEATURES, LABELS, validation_split=0.25, verbose=0), "that of others stays"


def test_its_own_data_set_needs_its_own_steps(balancer):
    with pytest.raises(ValueError, match=r"steps_per_epoch must be .* = 4, got 3"):
        fit(balancer, balancer.dataset(FEATURES, LABELS), steps_per_epoch=3)


def test_data_that_is_not_ours_is_none_of_its_business(balancer):
    model().fit(FEATURES, LABELS, batch_size=7, callbacks=[balancer], verbose=0)


def test_steps_per_epoch_needs_a_data_set(balancer):
    with pytest.raises(RuntimeError, match=r"call balancer\.dataset"):
        balancer.steps_per_epoch  # noqa: B018


def test_a_cluster_without_its_strategy_is_refused(monkeypatch):
    cluster = '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", cluster)
    with pytest.raises(
        ValueError, match=r"TF_CONFIG names 2 workers, but .* trains on one worker only"
    ):
        lbbsp_tf.LoadBalancer(tf.distribute.get_strategy(), X)


def test_fewer_samples_left_than_workers_are_named_not_lost(balancer, caplog):
    balancer.dataset(FEATURES[:49], LABELS[:49])
    assert balancer.steps_per_epoch == 4
    assert not caplog.records


def test_lists_of_arrays_are_inputs_not_one_array(balancer):
    batch = next(iter(balancer.dataset([FEATURES, FEATURES], LABELS)))
    assert [len(part) for part in batch[0]] == [X, X]
