"""In one process: training as stock gluon does, and refusals of a cluster."""

import gc
import logging
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    CLUSTER,
    DATA,
    FEATURES,
    LABELS,
    SAMPLES,
    X,
    assert_close,
    backward,
    network,
)
from mxnet import gluon, nd
from waits import HANG_SECONDS

import lbbsp_mx
from lbbsp_mx.trainer.peers import with_peers

ROOT = Path(__file__).parents[2]


def stock(epochs=2, norm=None, optimizer="adam", unused=()):
    net = network(norm=norm)
    trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
    for epoch in range(epochs):
        order = np.random.default_rng((5, epoch)).permutation(SAMPLES)
        for begin in range(0, SAMPLES, X):
            index = order[begin : begin + X]
            backward(net, nd.array(FEATURES[index]), nd.array(LABELS[index]))
            if begin // X not in unused:
                trainer.step(len(index))
    return net


def fit(trainer, net, epochs=2, devices=1, unused=(), **loading):
    sampler = trainer.batch_sampler(SAMPLES, seed=5)
    loader = gluon.data.DataLoader(DATA, batch_sampler=sampler, **loading)
    assert len(loader) == 4
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader):
            backward(net, x, y, devices)
            if number not in unused:
                trainer.step(len(x))


def ours(net, optimizer="adam", **options):
    return lbbsp_mx.Trainer(net.collect_params(), optimizer, global_batch_size=X, **options)


@pytest.mark.parametrize(
    ("devices", "kvstore", "loading"),
    [
        (1, "dist_sync", {}),
        (1, "local", {"num_workers": 2, "thread_pool": True}),
        (1, None, {}),
        (2, "device", {}),
        (2, "local", {}),
    ],
)
def test_it_learns_what_stock_gluon_learns_from_the_same_order(devices, kvstore, loading):
    net = network(devices)
    fit(ours(net, kvstore=kvstore), net, devices=devices, **loading)
    assert_close(net, stock(), atol=1e-6)


@pytest.mark.parametrize(
    ("unused", "loading"),
    [
        ((1, 2), {}),
        ((3,), {}),
        ((1,), {"num_workers": 1, "thread_pool": True, "prefetch": 1}),
    ],
)
def test_batches_may_have_no_step_as_in_gluon(unused, loading):
    net = network()
    fit(ours(net), net, unused=unused, **loading)
    assert_close(net, stock(unused=unused), atol=1e-6)


def test_batch_normalisation_alone_is_gluons():
    net = network(norm=lbbsp_mx.SyncBatchNorm)
    fit(ours(net, "sgd"), net)
    whole = stock(norm=gluon.nn.BatchNorm, optimizer="sgd")
    assert_close(net, whole, atol=2e-6)


def test_batch_normalisation_takes_the_arguments_of_gluons():
    options = {"in_channels": 8, "momentum": 0.8, "epsilon": 1e-3, "use_global_stats": True}
    stock = gluon.contrib.nn.SyncBatchNorm(num_devices=1, **options)
    assert (
        lbbsp_mx.SyncBatchNorm(num_devices=1, **options)._kwargs.items()
        >= {name: stock._kwargs[name] for name in ("momentum", "eps", "use_global_stats")}.items()
    )


def test_batch_normalisation_refuses_to_be_compiled_for_one_shape():
    net = network(norm=lbbsp_mx.SyncBatchNorm)
    net.hybridize(static_alloc=True)
    with pytest.raises(ValueError, match="needs static_shape=False, got True"):
        net.hybridize(static_alloc=True, static_shape=True)


def test_an_exported_network_with_batch_normalisation_predicts_after_its_layers_are_freed(tmp_path):
    net = network(norm=lbbsp_mx.SyncBatchNorm)
    net.hybridize()
    fit(ours(net), net)
    x = mx.nd.ones((3, 4))
    expected = net(x).asnumpy()
    net.export(str(tmp_path / "net"))
    del net
    gc.collect()
    files = [str(tmp_path / name) for name in ("net-symbol.json", "net-0000.params")]
    loaded = gluon.SymbolBlock.imports(files[0], ["data"], files[1])
    np.testing.assert_allclose(loaded(x).asnumpy(), expected, atol=1e-6)


def test_plain_batch_normalisation_is_warned_about(caplog):
    ours(network(norm=gluon.nn.BatchNorm))
    assert "use lbbsp_mx.SyncBatchNorm" in caplog.text
    caplog.clear()
    ours(network(norm=lbbsp_mx.SyncBatchNorm))
    for fixed in (gluon.nn.BatchNorm, gluon.nn.BatchNormReLU):
        ours(network(norm=partial(fixed, use_global_stats=True)))
    assert "SyncBatchNorm" not in caplog.text
    ours(network(norm=partial(gluon.contrib.nn.SyncBatchNorm, num_devices=1)))
    assert "use lbbsp_mx.SyncBatchNorm" in caplog.text


def test_it_says_in_one_line_that_there_is_nothing_to_balance(caplog):
    with caplog.at_level(logging.WARNING):
        ours(network())
    assert [r.message for r in caplog.records] == [
        "lbbsp_mx.Trainer is passive, because there is only one worker"
    ]


def test_a_record_is_written(tmp_path):
    net = network()
    trainer = ours(net, record=tmp_path)
    fit(trainer, net)
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 * 4
    assert '"framework": "mxnet"' in lines[0]
    assert (trainer.kvstore.rank, trainer.kvstore.num_workers) == (0, 1)


def test_mxnet_creates_the_stores_by_their_names():
    names = {name: mx.kv.create(name) for name in ("lbbsp", "dist_lbbsp", "lbbsp_local")}
    assert [type(store).__name__ for store in names.values()] == [
        *2 * ["WorkerSideStore"],
        "KVStore",
    ]
    assert not names["lbbsp"].is_capable("optimizer")
    assert names["lbbsp_local"].is_capable("optimizer")
    with pytest.raises(ValueError, match=r"dist_sync needs a cluster, and no DMLC_"):
        mx.kv.create("lbbsp_dist_sync")


def program(*command, **environment):
    clean = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *command]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=HANG_SECONDS)
    return done.returncode, done.stdout + done.stderr


def test_after_a_failed_import_it_says_what_to_do():
    text = "import numpy, sys\nif hasattr(numpy, 'bool'): sys.exit('nothing to fail')\n"
    text += "try: import mxnet\nexcept AttributeError: import lbbsp_mx\n"
    status, said = program("-c", text)
    assert status == 1
    assert "nothing to fail" in said or "`import lbbsp_mx` before `import mxnet`" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"DMLC_ROLE": "boss"}, "DMLC_ROLE must be one of worker, server, scheduler, got 'boss'"),
        ({"DMLC_PS_ROOT_PORT": "x"}, "DMLC_PS_ROOT_PORT must be a port, got 'x'"),
        ({"DMLC_PS_ROOT_PORT": "70000"}, "must be a port, got '70000'"),
        ({"DMLC_NUM_SERVER": "0"}, "DMLC_NUM_SERVER must be an integer >= 1, got '0'"),
        ({"DMLC_NUM_WORKER": "-1"}, "DMLC_NUM_WORKER must be an integer >= 1, got '-1'"),
        ({"DMLC_PS_ROOT_URI": ""}, "DMLC_PS_ROOT_URI must be set together with DMLC_ROLE"),
    ],
)
def test_a_wrong_cluster_is_named_with_the_cure(monkeypatch, change, said):
    for name, value in {**CLUSTER, **change}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said) as raised:
        lbbsp_mx.check_cluster()
    assert "or none of them to train with a single worker" in str(raised.value)


def test_no_cluster_and_a_right_one_are_fine(monkeypatch):
    lbbsp_mx.check_cluster()
    for name, value in CLUSTER.items():
        monkeypatch.setenv(name, value)
    lbbsp_mx.check_cluster()


def test_a_cluster_that_never_comes_ends_in_bounded_time():
    text = "import lbbsp_mx; lbbsp_mx.KVStore('dist_sync', start_seconds=1)"
    status, said = program("-c", text, **CLUSTER, DMLC_NODE_HOST="127.0.0.1")
    assert status == 1
    assert "2 workers and 1 servers at 127.0.0.1:9 has not started within 1 s" in said


def test_a_server_started_as_a_worker_says_so(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "lbbsp_mx.server", raising=False)
    with pytest.raises(SystemExit) as left:
        runpy.run_module("lbbsp_mx.server", run_name="__main__")
    assert left.value.code == 2
    assert "DMLC_ROLE must be server or scheduler, got None" in capsys.readouterr().err


def test_the_first_of_two_trainers_sums_their_gradients_before_they_are_clipped():
    for _ in range(8):  # the order of a set would be one of chance
        net = network()
        trainer = ours(net, update_on_kvstore=False)
        beside = lbbsp_mx.Trainer(net.collect_params(), "adam", beside=trainer)
        with_peers().update({id(each): each for each in (trainer, beside)})
        backward(net, nd.array(FEATURES[:X]), nd.array(LABELS[:X]))
        gluon.utils.clip_global_norm([p.grad() for p in net.collect_params().values()], 0.5)
        trainer.step(X)
