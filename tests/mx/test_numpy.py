"""MXNet's numpy mode in one process: as in gluon."""

import mxnet as mx
import numpy as np
import pytest
from helpers import DATA, FEATURES, LABELS, SAMPLES, X, assert_close, backward, network, weights
from mxnet import gluon, npx

import lbbsp_mx

OPTIONS = {"momentum": 0.9, "wd": 0.1}


@pytest.fixture(autouse=True)
def numpy_mode():
    npx.set_np()
    yield
    npx.reset_np()


def learn(net, trainer, batches, **options):
    """Uses the last layer in every second step."""
    for number, samples in enumerate(batches):
        used = net[: 2 - number % 2]
        backward(used, mx.np.array(FEATURES[samples]), mx.np.array(LABELS[samples]), **options)
        trainer.step(len(samples), ignore_stale_grad=True)


def assert_same(net, other):
    assert_close(net, other, atol=2e-6)


@pytest.mark.parametrize("sync", ["asp", "bsp"])
@pytest.mark.parametrize("devices", [1, 2])
def test_an_asynchronous_trainer_learns_what_stock_gluon_learns(sync, devices):
    net, expected = network(devices), network()
    params, whole = net.collect_params(), SAMPLES // X * X
    options = {"sync": sync, "global_batch_size": X, "seed": 5}
    trainer = lbbsp_mx.AsyncTrainer(params, "sgd", dict(OPTIONS), **options)
    drawn = []
    sampler = trainer.batch_sampler(whole)
    learn(net, trainer, (drawn.append(each) or each for each in sampler), devices=devices)
    trainer.finish()
    learn(expected, gluon.Trainer(expected.collect_params(), "sgd", dict(OPTIONS), None), drawn)
    assert_same(net, expected)


def test_a_trainer_continues_from_a_checkpoint(tmp_path):
    def make(net):
        options = {"global_batch_size": X, "seed": 5}
        trainer = lbbsp_mx.Trainer(net.collect_params(), "sgd", dict(OPTIONS), **options)
        return trainer, trainer.batch_sampler(SAMPLES)

    net, other = network(), network()
    trainer, sampler = make(net)
    learn(net, trainer, sampler)
    trainer.save(tmp_path)
    trainer.save_states(str(tmp_path / "states"))
    learn(net, trainer, sampler)
    continued, order = make(other)
    assert continued.load(tmp_path)
    continued.load_states(str(tmp_path / "states"))
    learn(other, continued, order)
    assert_same(net, other)


def test_a_loader_reads_numpy_arrays():
    net = network()
    trainer = lbbsp_mx.Trainer(net.collect_params(), "sgd", global_batch_size=X)
    sampler = trainer.batch_sampler(DATA, seed=0)
    before = weights(net)
    for x, y in gluon.data.DataLoader(DATA, batch_sampler=sampler):
        backward(net, x, y)
        trainer.step(len(x), weight=(y + 1).sum())
    assert all(np.abs(a - b).max() > 0 for a, b in zip(weights(net), before, strict=True))
