"""In one process: gluon's own trainer, with all of its options, with a global batch size or not."""

import copy

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
)
from mxnet import autograd, gluon, nd
from mxnet.gluon.contrib.estimator import Estimator

import lbbsp_mx
from lbbsp_core import Even

MOMENTUM = {"momentum": 0.9, "learning_rate": 0.1, "wd": 0.01}


def ours(net, optimizer="sgd", **options):
    given = dict(MOMENTUM) if optimizer == "sgd" else {}
    return lbbsp_mx.Trainer(net.collect_params(), optimizer, given, **options)


def stock(net, optimizer="sgd", **options):
    given = dict(MOMENTUM) if optimizer == "sgd" else {}
    return gluon.Trainer(net.collect_params(), optimizer, given, **options)


def batch(step):
    """A batch of another size in each step, for two devices at least."""
    begin, size = 3 * step, 5 + step % 4
    return nd.array(FEATURES[begin : begin + size]), nd.array(LABELS[begin : begin + size])


def train(net, trainer, steps, devices=1, begin=0):
    for step in range(begin, begin + steps):
        x, y = batch(step)
        backward(net, x, y, devices)
        trainer.step(len(x))


def on_all_devices(net):
    return [each.asnumpy() for p in net.collect_params().values() for each in p.list_data()]


def assert_equal(net, other):
    for mine, theirs in zip(on_all_devices(net), on_all_devices(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def assert_trains_alike(train, devices=1, **network_options):
    """Checks that a network learns the same, however its trainer is made."""
    nets = [network(devices, **network_options) for _ in range(2)]
    for net, make in zip(nets, (ours, stock), strict=True):
        train(net, make)
    assert_equal(*nets)


# --- as gluon ------------------------------------------------------------------------------------


@pytest.mark.parametrize("planned", [{}, {"global_batch_size": X}])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        lambda: {},
        lambda: {"update_on_kvstore": True, "kvstore": mx.kv.create("device")},
        lambda: {"update_on_kvstore": False},
        lambda: {"kvstore": None},
        lambda: {"kvstore": "local"},
        lambda: {"kvstore": "nccl_of_no_gpu"},
        lambda: {"kvstore": mx.kv.create("teststore")},
        lambda: {"compression_params": {"type": "2bit", "threshold": 0.05}},
    ],
    ids=["default", "store", "no_store", "none", "local", "unknown", "test", "compressed"],
)
def test_every_option_trains_as_gluons_trainer_does(options, devices, planned):
    nets, found = [network(devices), network(devices)], []
    for net, make, more in zip(nets, (ours, stock), (planned, {}), strict=True):
        trainer = make(net, **options(), **more)
        assert not trainer._kv_initialized
        try:
            train(net, trainer, 6, devices)
        except Exception as error:  # such as that of an unknown store on several devices
            found.append((type(error), str(error).splitlines()[0][:30]))
            continue
        kind = trainer._kvstore and trainer._kvstore.type
        found.append((trainer._kv_initialized, trainer._update_on_kvstore, kind))
    assert found[0] == found[1]
    assert_equal(*nets)


@pytest.mark.parametrize("make", [ours, stock])
def test_a_stores_updates_exclude_separate_calls(make):
    net = network(2)
    trainer = make(net)
    x, y = batch(0)
    backward(net, x, y, 2)
    for call in (lambda: trainer.update(1), trainer.allreduce_grads, lambda: trainer.update(1)):
        with pytest.raises(AssertionError, match="Try setting `update_on_kvstore` to False"):
            call()


@pytest.mark.parametrize("devices", [1, 2])
def test_separate_calls_divide_sums_as_gluon_does(devices):
    def train(net, make):
        trainer = make(net, update_on_kvstore=False)
        for step in range(4):
            x, y = batch(step)
            backward(net, x, y, devices)
            if devices > 1 or step % 2:
                trainer.allreduce_grads()
            gradients = [each for p in net.collect_params().values() for each in p.list_grad()]
            gluon.utils.clip_global_norm(gradients, 0.5)
            trainer.update(len(x))

    assert_trains_alike(train, devices)


@pytest.mark.parametrize("kvstore", ["lbbsp_device", "lbbsp", "object"])
def test_stores_of_this_package_train_as_gluons_do(kvstore):
    made = lbbsp_mx.KVStore("device") if kvstore == "object" else kvstore
    net, other = network(2), network(2)
    trainer = ours(net, kvstore=made)
    train(net, trainer, 4, 2)
    train(other, stock(other), 4, 2)
    assert_equal(net, other)
    assert trainer._update_on_kvstore == (kvstore != "lbbsp")
    assert trainer.kvstore.num_workers == 1


def test_trainers_that_share_a_store_have_keys_of_their_own():
    store = lbbsp_mx.KVStore("device")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.05})
    net, other, alone = network(2), gluon.nn.Dense(3, in_units=4), network(2)
    other.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    first, second = ours(net, kvstore=store), ours(other, kvstore=store)
    backward(other, *batch(0), 2)
    second.step(5)
    train(net, first, 4, 2)
    train(alone, ours(alone, compression_params={"type": "2bit", "threshold": 0.05}), 4, 2)
    assert_equal(net, alone)


def test_loaded_parameters_replace_those_of_an_updating_store(tmp_path):
    def train_twice(net, make):
        net.save_parameters(str(tmp_path / "weights"))
        trainer = make(net)
        train(net, trainer, 2, 2)
        net.load_parameters(str(tmp_path / "weights"))
        assert trainer._kvstore is None
        assert not trainer._kv_initialized
        train(net, trainer, 2, 2)

    assert_trains_alike(train_twice, 2)


# --- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["new", "trained"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("first", "second"),
    [(True, True), (True, False), (False, True)],
    ids=lambda value: "store" if value else "devices",
)
def test_states_continue_exactly_wherever_the_optimizer_runs(
    tmp_path, first, second, optimizer, before
):
    unbroken, broken, rest = network(2), network(2), network(2)
    train(unbroken, ours(unbroken, optimizer), 6, 2)
    trainer = ours(broken, optimizer, update_on_kvstore=first)
    train(broken, trainer, 4, 2)
    trainer.save_states(tmp_path / "states")
    broken.save_parameters(str(tmp_path / "weights"))
    trainer = ours(rest, optimizer, update_on_kvstore=second)
    if before == "trained":
        train(rest, trainer, 1, 2)
    rest.load_parameters(str(tmp_path / "weights"))
    trainer.load_states(tmp_path / "states")
    train(rest, trainer, 2, 2, begin=4)
    assert_equal(unbroken, rest)


@pytest.mark.parametrize("before", ["new", "trained"])
@pytest.mark.parametrize("devices", [1, 2])
def test_checkpoints_continue_exactly_with_an_updating_store(tmp_path, devices, before):
    unbroken, broken, rest = network(2), network(2), network(devices)
    planned = {"global_batch_size": X}
    train(unbroken, ours(unbroken, "adam"), 6, 2)
    trainer = ours(broken, "adam", **planned)
    train(broken, trainer, 4, 2)
    trainer.save(tmp_path)
    trainer = ours(rest, "adam", **planned)
    if before == "trained":
        train(rest, trainer, 1, devices)
    assert trainer.load(tmp_path)
    assert trainer._session.step == 4
    train(rest, trainer, 2, devices, begin=4)
    assert_close(unbroken, rest, atol=1e-6 if devices == 1 else 0)


@pytest.mark.parametrize(("saves", "loads"), [({}, {"global_batch_size": X}),
                                              ({"global_batch_size": X}, {})])  # fmt: skip
def test_states_do_not_need_the_same_global_batch_size(tmp_path, saves, loads):
    unbroken, broken = network(), network()
    train(unbroken, ours(unbroken), 4)
    trainer = ours(broken, **saves)
    train(broken, trainer, 3)
    trainer.save_states(tmp_path / "states")
    trainer = ours(broken, **loads)
    trainer.load_states(tmp_path / "states")
    if loads:
        assert trainer._session.step == 0, "the states of a step tell nothing of the session"
    train(broken, trainer, 1, begin=3)
    assert_equal(unbroken, broken)
    if loads:
        trainer.batch_sampler(SAMPLES)


def test_states_of_sparse_parameters_continue_exactly(tmp_path):
    net = Table()
    net.initialize(mx.init.One())
    trainer = ours(net)

    def step(row):
        with autograd.record():
            loss = net(nd.array([row])) ** 2
        loss.backward()
        trainer.step(1)

    for row in (1, 3, 1):
        step(row)
    trainer.save_states(tmp_path / "states")
    saved = trainer._kvstore._updater.states[0].asnumpy()
    assert np.abs(saved).max() > 0.1
    step(3)
    assert not np.array_equal(trainer._kvstore._updater.states[0].asnumpy(), saved)
    trainer.load_states(tmp_path / "states")
    found = trainer._kvstore._updater.states[0]
    assert found.stype == "row_sparse"
    np.testing.assert_array_equal(found.asnumpy(), saved)


def test_an_empty_row_sparse_state_is_read(tmp_path):
    param = gluon.Parameter("table", shape=(5, 2), stype="row_sparse", grad_stype="row_sparse")
    param.initialize()
    trainer = lbbsp_mx.Trainer([param], "sgd", {"momentum": 0.9})
    trainer._updaters[0].states = {0: mx.nd.sparse.zeros("row_sparse", (5, 2))}
    trainer.save_states(tmp_path / "states")
    trainer._updaters[0].states = {}
    trainer.load_states(tmp_path / "states")
    found = trainer._updaters[0].states[0]
    assert (found.stype, found.shape, float(found.norm().asscalar())) == ("row_sparse", (5, 2), 0)


# --- without a global batch size -----------------------------------------------------------------


@pytest.mark.parametrize(
    "needs",
    [
        lambda trainer, folder: trainer.batch_sampler(SAMPLES),
        lambda trainer, folder: trainer.sizes,
        lambda trainer, folder: trainer.rows,
        lambda trainer, folder: trainer.save(folder),
        lambda trainer, folder: trainer.load(folder),
        lambda trainer, folder: trainer.resume(folder),
    ],
    ids=["batch_sampler", "sizes", "rows", "save", "load", "resume"],
)
def test_what_needs_a_plan_asks_for_the_global_batch_size(needs, tmp_path):
    with pytest.raises(ValueError, match=r"pass global_batch_size to lbbsp_mx\.Trainer"):
        needs(ours(network()), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "names"),
    [({"accumulate": 2}, "accumulate"), ({"policy": Even(), "seed": 3}, "policy, seed")],
)
def test_options_of_a_plan_ask_for_the_global_batch_size(options, names):
    with pytest.raises(ValueError, match=f"global_batch_size must be given for {names}, got None"):
        ours(network(), **options)


def test_what_is_no_store_is_refused():
    with pytest.raises(ValueError, match=r"must be an lbbsp_mx\.KVStore or one of .* got 7:"):
        ours(network(), kvstore=7)


@pytest.mark.parametrize("kvstore", ["dist_sync", "local"])
def test_a_cluster_needs_the_global_batch_size_and_workers_that_update(in_cluster, kvstore):
    with pytest.raises(ValueError, match="must be given for several workers, got None: pass"):
        ours(network(), kvstore=kvstore)
    with pytest.raises(ValueError, match="update_on_kvstore must be False, got True"):
        ours(network(), kvstore=kvstore, update_on_kvstore=True, global_batch_size=X)
    with pytest.raises(ValueError, match="compression_params must be None"):
        ours(network(), kvstore=kvstore, compression_params={"type": "2bit"})


def test_a_local_store_in_a_cluster_is_warned_about(in_cluster, caplog):
    ours(network(), kvstore="device", global_batch_size=X)
    assert "'device' is not distributed, so that each worker trains a model of its own" in (
        caplog.text
    )


def test_batch_normalisation_without_a_plan_is_gluons(caplog):
    assert_trains_alike(lambda net, make: train(net, make(net), 3), norm=gluon.nn.BatchNorm)
    assert "SyncBatchNorm" not in caplog.text


def test_a_request_to_stop_and_means_need_no_plan():
    net = network()
    trainer = ours(net)
    train(net, trainer, 1)
    assert not trainer.stopping
    trainer.request_stop()
    assert not trainer.stopping
    train(net, trainer, 1, begin=1)
    assert trainer.stopping
    train(net, trainer, 1, begin=2)
    assert not trainer.stopping
    trainer.exclude_step()
    trainer.broadcast_parameters()
    assert trainer.mean_over_workers([1.5, 2.5], weight=3).tolist() == [1.5, 2.5]
    assert trainer.epoch == 0


def test_an_estimator_trains_without_a_plan():
    def fit(net, make):
        loader = gluon.data.DataLoader(DATA, batch_size=7)
        handlers = [lbbsp_mx.LoadBalancingHandler()] if make is ours else []
        Estimator(net, LOSS, trainer=make(net)).fit(loader, epochs=2, event_handlers=handlers)

    assert_trains_alike(fit)


@pytest.mark.parametrize("mean", [False, True])
def test_means_and_weights_need_no_plan(mean):
    def train(net, make):
        trainer = make(net, **({"mean_loss": mean} if make is ours else {}))
        for step in range(3):
            x, y = batch(step)
            with autograd.record():
                loss = LOSS(net(x), y)
                loss = loss.mean() if mean else loss
            loss.backward()
            if make is ours:
                trainer.step(len(x), weight=None if mean else 2.5)
            else:
                trainer.step(1 if mean else 2.5)

    assert_trains_alike(train)


# --- with a sampler ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"update_on_kvstore": False}])
def test_devices_without_samples_in_a_short_batch_add_nothing(options):
    net, whole = network(2), network()
    trainer = ours(net, global_batch_size=X, **options)
    reference = stock(whole)
    data = gluon.data.ArrayDataset(FEATURES[: X + 1], LABELS[: X + 1])
    sampler = trainer.batch_sampler(len(data), seed=3)
    for _ in range(2):
        for x, y in gluon.data.DataLoader(data, batch_sampler=sampler):
            backward(net, x, y, min(2, len(x)))
            trainer.step(len(x))
            backward(whole, x, y)
            reference.step(len(x))
    assert trainer._session.step == 4
    assert_close(net, whole, atol=1e-6)


@pytest.mark.parametrize("planned", [{}, {"global_batch_size": X}])
def test_trainers_beside_each_other_train_as_gluons_do(planned):
    pairs = [(network(2), network(2)) for _ in range(2)]
    for pair, make in zip(pairs, (ours, stock), strict=True):
        first = make(pair[0], **(planned if make is ours else {}))
        trainers = first, make(pair[1], **({"beside": first} if make is ours else {}))
        for step in range(4):
            x, y = batch(step)
            for net, trainer in zip(pair, trainers, strict=True):
                backward(net, x, y, 2)
                trainer.step(len(x))
    assert_equal(pairs[0][0], pairs[1][0])
    assert_equal(pairs[0][1], pairs[1][1])
    with pytest.raises(ValueError, match="global_batch_size must be that of the trainer beside"):
        ours(network(), beside=lbbsp_mx.Trainer(network().collect_params(), "sgd", **planned),
             global_batch_size=7)  # fmt: skip


def test_an_updating_store_lets_parameters_be_unused_as_gluons_does():
    net, other = network(2), network(2)
    for each, trainer in ((net, ours(net, global_batch_size=X)), (other, stock(other))):
        if each is net:
            next(iter(trainer.batch_sampler(SAMPLES)))
        for part in (each, each[0]):
            with autograd.record():
                losses = [part(nd.ones((8, 4), ctx=mx.cpu(i))).sum() for i in range(2)]
            autograd.backward(losses)
            trainer.step(X)
    assert_equal(net, other)


def test_a_single_worker_of_a_cluster_updates_as_several_do(in_cluster):
    net = network(2)
    trainer = ours(net, kvstore="device", global_batch_size=X)
    train(net, trainer, 1, 2)
    assert trainer._update_on_kvstore is False


@pytest.mark.parametrize("planned", [{}, {"global_batch_size": X}])
def test_a_network_with_a_trainer_can_be_copied(planned):
    net = network()
    trainer = ours(net, **planned)
    train(net, trainer, 2)
    assert_equal(net, copy.deepcopy(net))
    assert copy.deepcopy(trainer) is trainer


def test_a_trainer_without_a_plan_has_no_sizes():
    assert not hasattr(ours(network()), "sizes")
