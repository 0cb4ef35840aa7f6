"""In one process: mean gradients, accumulation, sparse gradients and weights, as in gluon."""

import logging

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    DATA,
    FEATURES,
    LABELS,
    LOSS,
    SAMPLES,
    Table,
    X,
    assert_close,
    backward,
    network,
    weights,
)
from mxnet import autograd, gluon, nd
from mxnet.gluon.contrib.estimator import Estimator

import lbbsp_mx
from lbbsp_core import Limits, SessionOptions
from lbbsp_mx.data.sampler import Draws
from lbbsp_mx.trainer.session import with_granularity
from lbbsp_mx.trainer.steps import SampleWeights

BATCH = nd.array(FEATURES[:6]), nd.array(LABELS[:6])


def trainer_of(net, **options):
    options = {"global_batch_size": X, "kvstore": "dist", **options}
    return lbbsp_mx.Trainer(net.collect_params(), "sgd", {"momentum": 0.9}, **options)


def stock(net):
    return gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9}, kvstore=None)


def gradient(net):
    return net[0].weight.grad().asnumpy()


def batches(trainer, **loading):
    sampler = trainer.batch_sampler(SAMPLES, seed=5)
    return gluon.data.DataLoader(DATA, batch_sampler=sampler, **loading)


@pytest.mark.parametrize("mean_loss", [False, True])
def test_allreduce_leaves_the_mean_gradient(mean_loss):
    net, other = network(), network()
    trainer = trainer_of(net, mean_loss=mean_loss)
    x, y = next(iter(batches(trainer)))
    for each in (net, other):
        with autograd.record():
            loss = LOSS(each(x), y)
            loss = loss.mean() if mean_loss or each is other else loss
        loss.backward()
    trainer.allreduce_grads()
    np.testing.assert_allclose(gradient(net), gradient(other), rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match=r"update must be called with 1, the 16 samples .* got 7"):
        trainer.update(7)
    trainer.update(16)  # the error has not ended the step
    stock(other).step(1)
    assert_close(net, other, atol=1e-6)


def test_without_our_sampler_update_divides_as_gluon_does():
    net, other = network(), network()
    for each, trainer in ((net, trainer_of(net)), (other, stock(other))):
        backward(each, *BATCH)
        trainer.allreduce_grads()
        trainer.update(6)
    assert_close(net, other)


@pytest.mark.parametrize("devices", [1, 2])
def test_accumulated_gradients_are_those_of_all_batches_of_a_step(devices):
    net, whole = network(devices), network()
    net.collect_params().setattr("grad_req", "add")
    trainer, reference = trainer_of(net, accumulate=4, kvstore="local"), stock(whole)
    loader = batches(trainer)
    assert len(loader) == 3 * 4, "the last step would have two samples for four batches"
    taken = []
    for number, (x, y) in enumerate(loader):
        taken.append((x, y))
        backward(net, x, y, devices)
        if number % 4 == 3:
            trainer.step(len(x))
            net.collect_params().zero_grad()
            backward(whole, *(nd.concat(*each, dim=0) for each in zip(*taken, strict=True)))
            reference.step(sum(len(x) for x, _ in taken))
            taken.clear()
    assert_close(net, whole, atol=1e-6)


def test_the_estimator_makes_a_step_after_all_parts_of_an_update():
    net, whole = network(), network()
    net.collect_params().setattr("grad_req", "add")
    trainer, reference = trainer_of(net, accumulate=4), stock(whole)
    estimator = Estimator(net, LOSS, mx.metric.Accuracy(), trainer=trainer)
    handler = lbbsp_mx.LoadBalancingHandler()
    for batches_of_fit in (12, 4):  # the second fit is left in the middle of an epoch
        estimator.fit(batches(trainer), batches=batches_of_fit, event_handlers=[handler])
    for epoch in (0, 1):
        order = np.random.default_rng((5, epoch)).permutation(SAMPLES)
        for begin in (0, X, 2 * X)[: 3 - 2 * epoch]:
            chosen = order[begin : begin + X]
            backward(whole, nd.array(FEATURES[chosen]), nd.array(LABELS[chosen]))
            reference.step(X)
    assert_close(net, whole, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "parts", "unit", "expected"),
    [
        (16, 4, 1, [4, 4, 4, 4]),
        (7, 3, 1, [2, 2, 3]),
        (6, 2, 2, [2, 4]),
        (7, 2, 2, [3, 4]),
        (2, 2, 2, [1, 1]),
    ],
)
def test_parts_keep_all_samples_in_order(size, parts, unit, expected):
    found = Draws(parts, unit).cut(np.arange(size))
    assert [len(part) for part in found] == expected
    assert np.concatenate(found).tolist() == list(range(size))


def test_a_batch_with_fewer_samples_than_parts_is_refused():
    with pytest.raises(ValueError, match=r"at least accumulate = 3 samples, got 2"):
        Draws(parts=3).cut(np.arange(2))


@pytest.mark.parametrize("loading", [{}, {"num_workers": 1, "thread_pool": True}])
def test_accumulation_that_the_trainer_does_not_know_is_refused(loading):
    net = network()
    net.collect_params().setattr("grad_req", "add")
    trainer = trainer_of(net, global_batch_size=4)
    loader = iter(batches(trainer, **loading))
    for _ in range(2):
        backward(net, *next(loader))
        backward(net, *next(loader))
        if trainer._session.step == 1:
            with pytest.raises(ValueError, match="create the trainer with accumulate=2"):
                trainer.step(4)
        else:
            trainer.step(4)


def test_parts_of_one_batch_and_loaders_ahead_are_no_accumulation_over_batches():
    net = network()
    net.collect_params().setattr("grad_req", "add")
    trainer = trainer_of(net, global_batch_size=4)
    loader = batches(trainer)
    for _ in range(2):
        ahead = list(loader)  # a script may read all batches of an epoch at first
        for x, y in ahead:
            for half in (slice(0, 1), slice(1, None)):
                backward(net, x[half], y[half])
            trainer.step(len(x))
            net.collect_params().zero_grad()


@pytest.mark.parametrize(
    ("devices", "options", "granularity"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (2, {"accumulate": 2}, 4),
        (2, {"granularity": 1}, 1),
        (3, {"granularity": 8}, 8),
        (3, {}, 1),
        (2, {"limits": Limits(17)}, 2),
        (2, {"limits": [Limits(1, 4), Limits()]}, 2),
    ],
)
def test_the_granularity_is_the_number_of_devices_times_parts(
    devices, options, granularity, caplog
):
    trainer = trainer_of(network(devices), kvstore="device", **options)
    assert trainer._session.balancer.constraints.granularity == granularity
    warned = "cannot be divided among 1 workers in multiples of 3" in caplog.text
    assert warned == (devices == 3 and not options)


@pytest.mark.parametrize(("largest", "granularity"), [(3, None), (4, 4)])
def test_limits_may_leave_no_plan_in_multiples_of_the_devices(largest, granularity, caplog):
    options = SessionOptions(limits=[Limits(1, largest), Limits()])
    assert with_granularity(options, [4, 4], 16).granularity == granularity
    assert ("in multiples of 4" in caplog.text) == (granularity is None)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("clipped", [False, True])
def test_sparse_gradients_learn_what_stock_gluon_learns(devices, clipped, caplog):
    def run(trainer_of_net, devices):
        mx.random.seed(3)
        net = gluon.nn.Embedding(9, 2, sparse_grad=True)
        net.initialize(ctx=[mx.cpu(i) for i in range(devices)])
        trainer = trainer_of_net(net)
        ids = nd.array([1, 1, 4, 7])
        for step in range(3):
            contexts = net.weight.list_ctx()
            parts = gluon.utils.split_and_load(ids + step % 2, contexts)
            with autograd.record():
                # The embedding of word 7 has no influence: its row occurs, with a zero gradient.
                losses = [(net(part) ** 2).sum(axis=1) * (part != 7) for part in parts]
            autograd.backward(losses)
            if clipped:
                trainer.allreduce_grads()
                trainer.update(4)
            else:
                trainer.step(4)
        return weights(net)

    options = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1}
    (ours,) = run(
        lambda net: lbbsp_mx.Trainer(
            net.collect_params(), "sgd", dict(options), kvstore="local", global_batch_size=4
        ),
        devices,
    )
    (theirs,) = run(
        lambda net: gluon.Trainer(net.collect_params(), "sgd", dict(options), kvstore=None), 1
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert "row-sparse" not in caplog.text


@pytest.mark.parametrize("mean", [False, True])
def test_sparse_parameters_learn_what_stock_gluon_learns(mean, tmp_path):
    def run(make):
        mx.random.seed(3)
        net = Table()
        net.initialize(mx.init.Uniform(0.5))
        trainer = make(net)
        for step in range(3):
            with autograd.record():
                losses = (net(nd.array([1, 1, 4, 6]) + step) ** 2).sum(axis=1)
                losses = losses.mean() if mean and make is ours else losses
            losses.backward()
            trainer.step(4)
        return net.table.row_sparse_data(nd.arange(9)).asnumpy(), trainer

    def ours(net):
        return trainer_of(net, global_batch_size=4, mean_loss=mean)

    def theirs(net):
        return gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})

    (found, trainer), (expected, _) = run(ours), run(theirs)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with pytest.raises(ValueError, match="allreduce_grads needs dense parameters"):
        trainer.allreduce_grads()
    with pytest.raises(ValueError, match=r"table is 'row_sparse', and a checkpoint cannot hold"):
        trainer.save(tmp_path)


def test_a_weight_divides_by_itself():
    net, other = network(), network()
    trainer = trainer_of(net)
    backward(net, *BATCH)
    trainer.step(6, weight=nd.array([2.5]))
    backward(other, *BATCH)
    stock(other).step(2.5)
    assert_close(net, other, atol=1e-7)
    for weight, said in ((0, "must be > 0, got 0"), (-1, "got -1"), (np.inf, "got inf")):
        backward(net, *BATCH)
        with pytest.raises(ValueError, match=said):
            trainer.step(6, weight=weight)


def test_sample_weights_are_noted_while_training_only(caplog):
    seen = SampleWeights()
    loss = gluon.loss.L2Loss()
    ones = nd.ones((2, 1))
    plain = loss(ones, 3 * ones, ones / 2).asnumpy()
    with autograd.record():
        loss(ones, ones)
    seen.warn_of_means(None)
    assert "sample_weight" not in caplog.text
    with autograd.record():
        np.testing.assert_array_equal(loss(ones, 3 * ones, ones / 2).asnumpy(), plain)
    seen.warn_of_means(2.0)
    assert "sample_weight" not in caplog.text
    with caplog.at_level(logging.WARNING):
        seen.warn_of_means(None)
        seen.warn_of_means(None)
    assert caplog.text.count("has a sample_weight") == 1


def test_one_worker_is_not_warned_because_it_does_as_gluon_does(caplog):
    net = network()
    trainer = trainer_of(net)
    with autograd.record():
        loss = LOSS(net(BATCH[0]), BATCH[1], nd.ones((6, 1)))
    loss.backward()
    trainer.step(6)
    assert "sample_weight" not in caplog.text


def test_a_short_step_of_a_sampler_without_a_sample_for_each_part_is_dropped(caplog):
    """Of 33 samples in steps of 16, the last one cannot be cut into two batches."""
    net = network()
    net.collect_params().setattr("grad_req", "add")
    trainer = trainer_of(net, accumulate=2)
    sampler = trainer.batch_sampler(SAMPLES, sampler=gluon.data.SequentialSampler(2 * X + 1))
    assert "1 samples of the sampler are dropped" in caplog.text
    assert [len(batch) for batch in sampler] == [X // 2] * 4


@pytest.mark.parametrize("store", ["dist_async", "lbbsp_dist_async"])
def test_asynchronous_stores_are_refused(store):
    with pytest.raises(ValueError, match="must be synchronous, got 'dist_async'"):
        trainer_of(network(), kvstore=store)


def test_batches_normalised_over_workers_are_not_accumulated():
    net = network(norm=lbbsp_mx.SyncBatchNorm)
    with pytest.raises(ValueError, match="SyncBatchNorm needs accumulate = 1, got 2"):
        trainer_of(net, accumulate=2)
