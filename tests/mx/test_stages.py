"""The stages of a gradient's way to the update, without other workers."""

import numpy as np
import pytest
from helpers import X, network
from mxnet import autograd, gluon, init, nd

import lbbsp_mx
from lbbsp_mx.trainer.by_hand import ChangedByHand
from lbbsp_mx.trainer.stages import Gradients, IdleDevices, MeanLosses
from lbbsp_mx.trainer.steps import StepSizes


@pytest.mark.parametrize(("devices", "options"), [(1, {}), (1, {"global_batch_size": X}), (2, {})])
def test_a_single_worker_has_no_stages(devices, options):
    assert lbbsp_mx.Trainer(network(devices).collect_params(), "sgd", **options)._stages == []


def test_a_single_worker_with_a_plan_for_several_devices_has_one_stage():
    params = network(2).collect_params()
    trainer = lbbsp_mx.Trainer(params, "sgd", global_batch_size=X)
    assert [type(each) for each in trainer._stages] == [IdleDevices]


@pytest.mark.parametrize(
    ("local", "weight", "expected"), [(3, None, [6, 9]), (3, 2.0, [4, 6]), (3, 0.0, [0, 0])]
)
def test_means_are_multiplied_by_the_samples_or_the_weight(local, weight, expected):
    first = network().collect_params().values()
    gradients = Gradients(list(first)[:1], StepSizes(local, (), X, 0, True), weight)
    means = [2, 3] if weight != 0 else [np.nan, np.nan]  # the mean of nothing
    gradients.arrays = {0: [nd.array(means)], 1: [nd.array([[*means, 1]])]}
    gradients.copies = {1}  # of rows, whose last column tells that it occurs
    MeanLosses().before_sums(gradients)
    assert gradients.arrays[0][0].asnumpy().tolist() == expected
    copy = gradients.arrays[1][0].asnumpy()[0]
    assert copy[:2].tolist() == expected
    assert copy[2] > 0


MASK = [[1, 0, 1, 0.5]]


@pytest.mark.parametrize(
    ("change", "warns"),
    [
        (lambda gradient, step: None, False),
        (lambda gradient, step: gradient * 0.3, False),
        (lambda gradient, step: gradient * nd.array(MASK, dtype=gradient.dtype), False),
        (lambda gradient, step: gradient / 2**step, False),  # the scale of a loss
        (lambda gradient, step: gradient / (step + 1), True),
        (lambda gradient, step: gradient * min(1, 0.1 / gradient.norm().asscalar()), True),
        (lambda gradient, step: gradient.clip(-0.1, 0.1), True),
        (lambda gradient, step: gradient + 0.1, True),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_that_are_changed_by_what_is_in_them_are_warned_of_once(
    change, warns, dtype, caplog
):
    param = gluon.Parameter("w", shape=(8, 4), dtype=dtype)
    param.initialize(init.Uniform(1))
    stage, rng = ChangedByHand([param]), np.random.default_rng(0)
    for step in range(102):
        with autograd.record():
            (param.data() * nd.array(rng.normal(size=(8, 4)), dtype=dtype)).square().backward()
            stage.after_backward()
        if (new := change(param.grad(), step % 50)) is not None:
            param.grad()[:] = new
        stage.before_sums(Gradients([param], StepSizes(8, (), X, 0, True), None))
    assert [text.split()[2] for text in caplog.messages] == ["w"] * warns


def test_gradients_that_are_needed_first_are_sent_first_as_by_gluon():
    sent = []

    class Store:
        def pushpull(self, key, value, priority):
            sent.append((key, priority))

    params = list(network().collect_params().values())
    Gradients(params, StepSizes(3, (), X, 0, True), None).sum_over(Store())
    assert sent == [(number, -number) for number in range(len(params))]
