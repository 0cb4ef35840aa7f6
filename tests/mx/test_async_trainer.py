"""`AsyncTrainer` in one process, where every scheme is plain training."""

import copy
import itertools
import tempfile

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    DATA,
    FEATURES,
    LABELS,
    SAMPLES,
    X,
    assert_close,
    backward,
    learn,
    network,
    weights,
)
from mxnet import gluon, nd

import lbbsp_mx
from lbbsp_core import ASP, BSP, SSP, EpochBalanced, Limits, LoadBalanced, Profile, read_run
from lbbsp_core.order import SampleStream
from lbbsp_mx import cluster
from lbbsp_mx.store.native import runtime


def asynchronous(net, optimizer="adam", **options):
    options = {"sync": ASP(), "global_batch_size": X, "seed": 5} | options
    return lbbsp_mx.AsyncTrainer(net.collect_params(), optimizer, **options)


@pytest.mark.parametrize("sync", [ASP(), SSP(2), BSP()])
@pytest.mark.parametrize(
    ("devices", "loading"), [(1, {}), (2, {}), (1, {"num_workers": 2, "thread_pool": True})]
)
def test_it_learns_what_stock_gluon_learns_from_the_same_batches(sync, devices, loading, tmp_path):
    expected, stream = network(), SampleStream(SAMPLES, 5)
    trainer = gluon.Trainer(expected.collect_params(), "adam", kvstore=None)
    for begin in range(0, 2 * SAMPLES, X):
        index = stream.take(begin, min(begin + X, 2 * SAMPLES))
        backward(expected, nd.array(FEATURES[index]), nd.array(LABELS[index]))
        trainer.step(len(index) if sync == BSP() else X)

    net = network(devices)
    trainer = asynchronous(net, sync=sync, record=tmp_path)
    sampler = trainer.batch_sampler(SAMPLES, epochs=2)
    learn(net, trainer, gluon.data.DataLoader(DATA, batch_sampler=sampler, **loading), devices)
    trainer.finish()
    assert_close(net, expected, atol=2e-6)
    pushes = read_run(tmp_path).pushes
    assert [line.samples for line in pushes] == [16] * 6 + [4]
    assert {(line.worker, line.staleness, line.lead) for line in pushes} == {(0, 0, 0)}


@pytest.mark.parametrize("sync", [ASP(), BSP()])
@pytest.mark.parametrize("devices", [1, 2])
def test_layers_that_a_batch_does_not_use_are_refused_or_stay_as_in_gluon(sync, devices):
    options = {"momentum": 0.9, "wd": 0.1}
    net, expected = network(devices), network()
    trainer = asynchronous(net, "sgd", sync=sync, optimizer_params=dict(options))
    stock = gluon.Trainer(expected.collect_params(), "sgd", dict(options), kvstore=None)
    for number, samples in enumerate(trainer.batch_sampler(SAMPLES, epochs=2)):
        batch = nd.array(FEATURES[samples]), nd.array(LABELS[samples])
        used = slice(0, 2 - number % 2)
        backward(net[used], *batch, devices)
        backward(expected[used], *batch)
        if number % 2:
            with pytest.raises(UserWarning, match="not been updated by backward since last `step`"):
                trainer.step(len(samples))
        trainer.step(len(samples), ignore_stale_grad=True)
        stock.step(len(samples) if sync == BSP() else X, ignore_stale_grad=True)
    trainer.finish()
    assert_close(net, expected, atol=2e-6)


def test_sharing_needs_iterations_that_end_together():
    with pytest.raises(
        ValueError, match=r"got sync=SSP\(staleness=2\): use BSP\(\), or leave share_work out"
    ):
        asynchronous(network(), sync=SSP(2), share_work=0.5)
    with pytest.raises(ValueError, match='share_work must be True, False, "auto", or a fraction'):
        asynchronous(network(), sync=BSP(), share_work="always")


def test_an_epoch_at_a_time():
    net = network()
    trainer = asynchronous(net)
    sampler = trainer.batch_sampler(SAMPLES)
    for _ in range(3):
        drawn = []
        for samples in sampler:
            drawn += samples
            backward(net, nd.array(FEATURES[samples]), nd.array(LABELS[samples]))
            trainer.step(len(samples))
        assert sorted(drawn) == list(range(SAMPLES))


def test_samplers_follow_each_other():
    net = network()
    trainer = asynchronous(net)

    def draw(sampler, steps=None):
        drawn = []
        for samples in itertools.islice(sampler, steps):
            drawn += samples
            backward(net, nd.array(FEATURES[samples]), nd.array(LABELS[samples]))
            trainer.step(len(samples))
        return drawn

    first, other = trainer.batch_sampler(SAMPLES), trainer.batch_sampler(20, seed=3)
    stream = SampleStream(SAMPLES, 5)
    assert draw(first) == stream.take(0, SAMPLES).tolist()
    assert draw(other) == SampleStream(20, 3).take(0, 20).tolist()
    assert draw(first) == stream.take(SAMPLES, 2 * SAMPLES).tolist()
    assert len(draw(first, steps=1)) == X, "and the rest is dropped"
    for _ in range(2):
        assert sorted(draw(trainer.batch_sampler(DATA))) == list(range(SAMPLES))


def test_learning_rates_of_single_parameters_hold_on_the_server():
    net = network()
    for param in net[0].collect_params().values():
        param.lr_mult = 0.0
    before = weights(net)
    trainer = asynchronous(net, "sgd", optimizer_params={"learning_rate": 0.1})
    for samples in trainer.batch_sampler(SAMPLES):
        backward(net, nd.array(FEATURES[samples]), nd.array(LABELS[samples]))
        trainer.step(len(samples))
    trainer.finish()
    moved = [float(np.abs(a - b).max()) for a, b in zip(weights(net), before, strict=True)]
    assert moved[:2] == [0.0, 0.0]
    assert min(moved[2:]) > 0


def test_a_step_belongs_to_a_batch_that_was_drawn():
    net = network()
    trainer = asynchronous(net)
    with pytest.raises(ValueError, match="once for each batch that was drawn"):
        trainer.step(X)
    samples = next(iter(trainer.batch_sampler(SAMPLES)))
    backward(net, nd.array(FEATURES[samples]), nd.array(LABELS[samples]))
    with pytest.raises(ValueError, match="got 3: draw batches by"):
        trainer.step(3)
    trainer.step(len(samples))
    with pytest.raises(TypeError, match=r"len\(\) is not available"):
        len(trainer.batch_sampler(SAMPLES))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cost": Profile([1, 8, 16], [0.1, 0.2, 0.9])}, "cost must be a straight line"),
        (
            {"policy": EpochBalanced()},
            "policy EpochBalanced and this synchroniser cannot be combined",
        ),
        ({"limits": Limits(0, 8)}, "Limits.minimum must be >= 1 while training"),
        ({"limits": [Limits(), Limits()]}, "one for each of the 1 workers, got 2"),
        ({"global_batch_size": 16, "limits": Limits(1, 8)}, "16"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        asynchronous(network(), **options)


def test_parameters_must_be_known_and_dense():
    net = gluon.nn.Dense(3)
    net.initialize()
    with pytest.raises(ValueError, match="must be initialised, with its shape known"):
        asynchronous(net)
    net = gluon.nn.Embedding(5, 2, sparse_grad=True)
    net.initialize()
    with pytest.raises(ValueError, match="must be dense, with dense gradients"):
        asynchronous(net)


def test_a_policy_may_predict():
    trainer = asynchronous(network(), policy=LoadBalanced())
    assert len(next(iter(trainer.batch_sampler(SAMPLES)))) == X


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda it: it.set_learning_rate(0.1), "give it an lr_scheduler, which counts pushes"),
        (lambda it: it.allreduce_grads(), "enter the model only by step"),
        (lambda it: it.update(X), "enter the model only by step"),
        (lambda it: it.save_states("states"), "the optimizer's state is on the servers"),
        (lambda it: it.load_states("states"), "the optimizer's state is on the servers"),
        (lambda it: it.resume("folder", every=5), "the optimizer's state is on the servers"),
        (lambda it: it.save("folder"), "the optimizer's state is on the servers"),
        (lambda it: it.load("folder"), "the optimizer's state is on the servers"),
        (lambda it: it.sizes, r"draw them by trainer.batch_sampler"),
        (lambda it: it.rows, r"draw them by trainer.batch_sampler"),
        (lambda it: it.epoch, "count the iterations over the loader"),
        (lambda it: it.stopping, r"call trainer.finish\(\)"),
        (lambda it: it.request_stop(), r"call trainer.finish\(\)"),
        (lambda it: it.broadcast_parameters(), "set parameters before the trainer is created"),
        (lambda it: it.mean_over_workers(1.0), "evaluate the final model after trainer.finish"),
        (lambda it: it.kvstore.rank, "read trainer.rank and trainer.num_workers"),
        (lambda it: it.step(X, weight=2.0), "weight must be None, got 2.0: each push is divided"),
        (lambda it: it.batch_sampler(DATA, work=[1.0] * SAMPLES), "seed and shuffle, got work"),
        (lambda it: it.batch_sampler(DATA, sampler=[], beside=None), "got sampler, beside"),
    ],
)
def test_what_the_servers_cannot_do_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call(asynchronous(network()))


def test_a_trainer_does_not_have_what_it_refuses():
    trainer = asynchronous(network())
    assert not any(hasattr(trainer, name) for name in ("sizes", "resume", "kvstore"))
    assert trainer.rank == 0


@pytest.mark.parametrize("options", [{}, {"seed": 7}, {"shuffle": False}])
def test_the_order_is_that_of_the_seed(options):
    sampler = asynchronous(network()).batch_sampler(DATA, **options)
    expected = SampleStream(SAMPLES, **{"seed": 5} | options)
    assert next(iter(sampler)) == expected.take(0, X).tolist()


@pytest.mark.parametrize("sync", [ASP(), BSP()])
def test_the_learning_rate_is_that_of_the_servers(sync):
    def scheduler():
        return mx.lr_scheduler.PolyScheduler(20, base_lr=0.5, warmup_steps=3)

    net, expected = network(), network()
    options = {"lr_scheduler": scheduler()}
    trainer = asynchronous(net, "sgd", sync=sync, optimizer_params=options)
    stock = gluon.Trainer(expected.collect_params(), "sgd", {"lr_scheduler": scheduler()})
    for samples in trainer.batch_sampler(SAMPLES, epochs=2):
        assert trainer.learning_rate == stock.learning_rate
        for each, steps in (net, trainer), (expected, stock):
            backward(each, nd.array(FEATURES[samples]), nd.array(LABELS[samples]))
            steps.step(len(samples))
    assert trainer.learning_rate == stock.learning_rate > 0


def test_a_network_can_be_copied():
    net = network()
    trainer = asynchronous(net)
    for samples in trainer.batch_sampler(SAMPLES):
        backward(net, nd.array(FEATURES[samples]), nd.array(LABELS[samples]))
        trainer.step(len(samples))
    assert_close(copy.deepcopy(net), net)


def test_layers_that_need_workers_in_step_are_refused(monkeypatch):
    monkeypatch.setattr(cluster, "in_cluster", lambda: True)
    with pytest.raises(ValueError, match="SyncBatchNorm needs workers in step: use a normalis"):
        asynchronous(network(norm=lbbsp_mx.SyncBatchNorm))


def test_an_iteration_that_is_left_half_way_does_not_disturb_the_next():
    net = network()
    trainer = asynchronous(net)
    sampler = trainer.batch_sampler(SAMPLES)
    assert len(next(iter(sampler))) == X, "drawn, and left"
    sizes = []
    for samples in sampler:
        backward(net, nd.array(FEATURES[samples]), nd.array(LABELS[samples]))
        trainer.step(len(samples))
        sizes.append(len(samples))
    assert sum(sizes) == 2 * SAMPLES - X


@pytest.mark.parametrize("loading", [{}, {"num_workers": 2, "thread_pool": True}])
def test_each_batch_that_was_drawn_has_a_step(loading):
    net = network()
    trainer = asynchronous(net)
    sampler = trainer.batch_sampler(SAMPLES, epochs=3)
    for number, (x, y) in enumerate(gluon.data.DataLoader(DATA, batch_sampler=sampler, **loading)):
        if number == 1:
            continue  # as scripts do with a loss that is not finite
        backward(net, x, y)
        if number > 1:
            with pytest.raises(ValueError, match="no step was made before the next one: call step"):
                trainer.step(len(x))
            return
        trainer.step(len(x))


def test_shared_parts_are_not_accumulated_twice():
    net = network()
    trainer = asynchronous(net, sync=BSP(), share_work=0.5)
    net.collect_params().setattr("grad_req", "add")
    samples = next(iter(trainer.batch_sampler(SAMPLES)))
    with pytest.raises(ValueError, match="grad_req='add' would count them again"):
        trainer.step(len(samples))


def clip(net):
    for param in net.collect_params().values():
        param.set_data(param.data().clip(-0.01, 0.01))


def load(net):
    other = network()
    other.initialize(init="ones", force_reinit=True)
    with tempfile.TemporaryDirectory() as folder:
        other.save_parameters(f"{folder}/net")
        net.load_parameters(f"{folder}/net")


def write_in_place(net):
    net[1].bias.data()[1] = 0.5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda net: net.collect_params().setattr("grad_req", "null"), "grad_req .*: set them"),
        (lambda net: net.collect_params(".*bias").setattr("wd_mult", 0.0), "1: 0, 3: 0: set them"),
        (lambda net: net.collect_params(".*bias").setattr("lr_mult", 2.0), r"\(all 1\), got 1: 2"),
        (clip, "parameters have changed since the trainer read them"),
        (load, "load or set them before the trainer is created"),
        (write_in_place, "parameters have changed since the trainer read them"),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_what_learns_is_settled_at_the_start(change, said, steps):
    net = network()
    trainer = asynchronous(net)
    for number, samples in enumerate(trainer.batch_sampler(SAMPLES)):
        backward(net, nd.array(FEATURES[samples]), nd.array(LABELS[samples]))
        if number == steps:
            change(net)
            with pytest.raises(ValueError, match=said):
                trainer.step(len(samples))
            return
        trainer.step(len(samples))


def test_clipping_of_single_pushes_is_told_once(caplog):
    net, other = network(), network()
    trainer = asynchronous(net)
    for clipped, told in ((other, 0), (net, 1), (net, 1)):
        backward(clipped, nd.array(FEATURES[:X]), nd.array(LABELS[:X]))
        trainer.sum_for_clipping([p.grad() for p in clipped.collect_params().values()])
        assert caplog.text.count("clips the gradients of each push") == told


@pytest.mark.parametrize("name", ["lr", "wd"])
def test_rates_are_settled_at_the_start(name):
    trainer = asynchronous(network())
    setattr(trainer.optimizer, name, 0.25)
    with pytest.raises(ValueError, match=f"{name} of the optimizer .*, got 0.25: set them before"):
        trainer.step(X)


def test_the_servers_run_nothing_else(monkeypatch):
    monkeypatch.setattr(cluster, "in_cluster", lambda: True)
    monkeypatch.setattr(runtime(), "taken", {7})
    with pytest.raises(ValueError, match="a KVStore of this process has given them keys"):
        asynchronous(network())
    monkeypatch.setattr(runtime(), "taken", set())
    monkeypatch.setattr(runtime(), "compresses", True)
    with pytest.raises(ValueError, match="or gradient compression: use a separate job"):
        asynchronous(network())


def test_batch_norm_is_warned_of(caplog):
    for fixed in (True, False):
        net = gluon.nn.BatchNorm(in_channels=4, use_global_stats=fixed)
        net.initialize()
        asynchronous(net)
        assert ("each worker keeps its own running moments" in caplog.text) != fixed
