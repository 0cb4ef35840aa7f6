"""Batch normalisation over the global batch: what the workers send each other."""

import numpy as np
import pytest
from helpers import network
from mxnet import autograd, gluon, nd

from lbbsp_mx import SyncBatchNorm


class TwoWorkers:
    """Gathers float32, as stores do; both workers send the same row."""

    def gather(self, use, row):
        return np.stack([row, row]).astype(np.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-13)])
def test_moments_are_gathered_in_the_precision_of_the_network(dtype, tolerance):
    peers = network(norm=SyncBatchNorm)[1].running_mean.lbbsp_synchronised
    peers.turns = {"moments": TwoWorkers()}
    row = np.array([48.0, np.pi, -1e-3 / 3, 1e5 / 3], dtype)
    gathered = peers.gather("moments", 0, row)
    assert gathered.shape == (2, 4)
    np.testing.assert_allclose(gathered, [row, row], rtol=tolerance)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("options", [{}, {"scale": False}, {"use_global_stats": True}])
def test_half_precision_learns_what_single_precision_learns(hybrid, options):
    """MXNet has no dense layer of half precision for CPUs."""

    def trained(norm, dtype):
        net = gluon.nn.HybridSequential()
        net.add(norm(in_channels=8, **options))
        net.initialize()
        net.cast(dtype)
        if hybrid:
            net.hybridize()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        rng = np.random.default_rng(0)
        x, y = (nd.array(rng.normal(3, 2, (16, 8)).astype("f2"), dtype=dtype) for _ in range(2))
        for _ in range(3):
            with autograd.record():
                out = net(x)
                loss = ((out - y) ** 2).sum(axis=1)
            loss.backward()
            trainer.step(16)
        assert out.dtype == x.dtype
        return [param.data().asnumpy() for param in net.collect_params().values()]

    half, single = trained(SyncBatchNorm, "float16"), trained(gluon.nn.BatchNorm, "float32")
    assert {each.dtype.name for each in half} == {"float32"}, "as gluon's layer keeps them"
    for ours, expected in zip(half, single, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-3, atol=2e-3)
