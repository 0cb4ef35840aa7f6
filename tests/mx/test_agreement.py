"""One worker: what keeps models of several workers equal changes nothing."""

import threading

import mxnet as mx
import numpy as np
import pytest
from helpers import DATA, SAMPLES, X, backward, learn, network, weights
from mxnet import gluon, nd

import lbbsp_mx
from lbbsp_mx.fence import wait_for
from lbbsp_mx.reliability import agreement
from lbbsp_mx.reliability.agreement import Agreement


def trainer(net, optimizer="sgd", **options):
    return lbbsp_mx.Trainer(net.collect_params(), optimizer, global_batch_size=X, **options)


@pytest.mark.parametrize("value", [0.1, [0.1, 0.2], np.array([[1.5, -2.0]]), nd.array([3.0])])
def test_a_mean_over_one_worker_is_its_value_in_the_same_shape(value):
    found = trainer(network()).mean_over_workers(value, weight=0.7)
    expected = value.asnumpy() if isinstance(value, nd.NDArray) else np.asarray(value)
    assert np.shape(found) == expected.shape
    np.testing.assert_array_equal(found, expected)
    assert isinstance(found, float) == isinstance(value, float)


def test_a_metric_has_the_weight_of_its_samples(monkeypatch):
    metric = mx.metric.Accuracy()
    metric.update(nd.array([0, 1, 1]), nd.array([[1, 0], [1, 0], [0, 1]]))
    seen = []
    monkeypatch.setattr(
        agreement, "weighted_mean", lambda *values: seen.append(values[1:]) or [0.5]
    )
    assert trainer(network()).mean_over_workers(metric) == 0.5
    assert seen == [([pytest.approx(2 / 3)], 3)]


def test_a_mean_can_be_taken_in_the_middle_of_training():
    net = network()
    it = trainer(net)
    for x, y in gluon.data.DataLoader(DATA, batch_sampler=it.batch_sampler(SAMPLES)):
        backward(net, x, y)
        it.step(len(x))
        assert it.mean_over_workers(float(len(x))) == len(x)
    assert it._session.step == 4


class Held(mx.operator.CustomOp):
    """An operator that runs once somebody waits for the gradients."""

    awaited, ran = threading.Event(), False

    def forward(self, is_train, req, in_data, out_data, aux):
        Held.awaited.wait()
        Held.ran = True
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("lbbsp_test_held")
class HeldProperties(mx.operator.CustomOpProp):
    def create_operator(self, ctx, in_shapes, in_dtypes):
        return Held()


@pytest.mark.parametrize("read", [Agreement._weights, lambda it: it._gather(0)])
def test_weights_are_read_when_the_batch_no_longer_reads_them(read, monkeypatch):
    """A convolution stores those that it reads in another layout meanwhile."""
    net = network()
    it, gradient = trainer(net), next(iter(net.collect_params().values())).grad()
    monkeypatch.setattr(
        agreement, "wait_for", lambda arrays: (Held.awaited.set(), wait_for(arrays))
    )
    Held.ran = False
    Held.awaited.clear()
    nd.Custom(gradient, op_type="lbbsp_test_held", out=gradient)
    read(it._agreement)
    ran = Held.ran
    Held.awaited.set()
    assert ran


def settings(optimizer):
    it = trainer(network(), optimizer)
    return Agreement(it)._settings()


def test_settings_are_the_hyperparameters_that_an_update_depends_on():
    found = settings(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, wd=0.01, clip_gradient=2.0))
    expected = {"learning rate": 0.1, "momentum": 0.9, "wd": 0.01, "clip_gradient": 2.0}
    assert {**found, **expected, "number of updates": 0, "rescale_grad": 1.0} == found
    found = settings(mx.optimizer.Adam(beta1=0.5, epsilon=1e-5))
    assert (found["beta1"], found["beta2"], found["epsilon"]) == (0.5, 0.999, 1e-5)


def test_settings_name_the_parameters_that_differ_from_the_others():
    net = network()
    it = trainer(net)
    before = it._agreement._settings()
    net[0].bias.lr_mult, net[1].weight.wd_mult = 2.0, 0.5
    net[0].collect_params().setattr("grad_req", "null")
    after = it._agreement._settings()
    assert {name: value for name, value in after.items() if value != before[name]} == {
        "lr_mult of parameters": "1: 2",
        "wd_mult of parameters": "2: 0.5",
        "grad_req of parameters": "0: null, 1: null",
    }


def test_the_rate_of_a_schedule_is_that_of_the_coming_update():
    schedule = mx.lr_scheduler.PolyScheduler(max_update=10, base_lr=0.8)
    found = settings(mx.optimizer.SGD(learning_rate=0.8, lr_scheduler=schedule))
    assert found["learning rate"] == schedule(1) < schedule(0)


@pytest.mark.parametrize("passes", [lambda net: net, lambda net: net[0], lambda net: net[1:]])
def test_the_rest_of_the_network_is_found(passes):
    net = gluon.nn.HybridSequential()
    parts = gluon.nn.Dense(8, in_units=4), gluon.nn.BatchNorm(in_channels=8), gluon.nn.Dense(2)
    net.add(*parts)
    net.initialize()
    model = gluon.nn.Sequential()  # holds the network
    model.add(net, gluon.nn.Embedding(5, 3))
    model[1].initialize()
    it = trainer(passes(net))
    expected = {id(param) for layer in (*parts, model[1]) for param in layer.params.values()
                if "running" not in param.name}  # fmt: skip
    expected -= {id(net[2].weight), *map(id, it._params)}  # the former has no shape yet
    assert set(map(id, Agreement(it)._others())) == expected


def test_a_single_worker_compares_nothing(monkeypatch):
    monkeypatch.setattr(Agreement, "_gather", lambda *args: pytest.fail("no peers"))
    monkeypatch.setattr(Agreement, "_settings", lambda *args: pytest.fail("no peers"))
    net = network()
    it = trainer(net)
    learn(net, it, gluon.data.DataLoader(DATA, batch_sampler=it.batch_sampler(SAMPLES)))
    before = weights(net)
    it.broadcast_parameters()
    np.testing.assert_equal(weights(net), before)
