"""A small data set and network, for tests in one process."""

from itertools import islice

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

SAMPLES, X = 50, 16
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 4)).astype("f4")
LABELS = rng.integers(0, 2, SAMPLES).astype("f4")
DATA = gluon.data.ArrayDataset(FEATURES, LABELS)
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
CLUSTER = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9",
    "DMLC_NUM_SERVER": "1",
    "DMLC_NUM_WORKER": "2",
}


def network(devices=1, norm=None):
    mx.random.seed(0)
    np.random.seed(0)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, in_units=4), *([norm(in_channels=8)] if norm else []))
    net.add(gluon.nn.Dense(2, in_units=8))
    net.initialize(mx.init.Xavier(), ctx=[mx.cpu(i) for i in range(devices)])
    return net


class Table(gluon.Block):
    """A row-sparse parameter, of which a pass reads some rows."""

    def __init__(self):
        super().__init__()
        options = {"shape": (9, 2), "stype": "row_sparse", "grad_stype": "row_sparse"}
        self.table = self.params.get("table", **options)

    def forward(self, ids):
        rows = self.table.row_sparse_data(ids)
        return nd.sparse.dot(nd.one_hot(ids, 9).tostype("csr"), rows)


def weights(net):
    return [p.data(p.list_ctx()[0]).asnumpy() for p in net.collect_params().values()]


def backward(net, x, y, devices=1):
    contexts = [mx.cpu(i) for i in range(devices)]
    with autograd.record():
        losses = [
            LOSS(net(a), b)
            for a, b in zip(
                gluon.utils.split_and_load(x, contexts, even_split=False),
                gluon.utils.split_and_load(y, contexts, even_split=False),
                strict=True,
            )
        ]
    autograd.backward(losses)


def assert_close(net, other, atol=0.0):
    """Checks that two networks have the same weights."""
    for mine, theirs in zip(weights(net), weights(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol)


def learn(net, trainer, loader, devices=1, steps=None):
    """Makes a step on each batch of a loader, or on the first ones."""
    for x, y in islice(loader, steps):
        backward(net, x, y, devices)
        trainer.step(len(x))
