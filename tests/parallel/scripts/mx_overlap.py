"""Trains networks whose backward pass waits below the top layer: ``mx_overlap.py FOLDER``.

It waits for the sum of the top layer, and would never end if that were sent only afterwards; not
where all gradients are in one part, nor in steps that read the weights, which wait themselves.
"""

import sys
import threading

import lbbsp_mx

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon
from report import result

from lbbsp_core import read_run

LARGE, SMALL = 512, 8  # units below a top layer of 2 MiB, and of a few bytes
X, STEPS = 8, 6
arrived = threading.Event()


class Wait(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        arrived.wait()
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("wait")
class WaitProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Wait()


class Waits(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.Custom(x, op_type="wait")


def train(units, folder):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(units, in_units=8), Waits(), gluon.nn.Dense(2 * units, in_units=units))
    net.initialize(mx.init.Xavier())
    trainer = lbbsp_mx.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.01}, global_batch_size=X, policy="bsp",
        record=folder,
    )  # fmt: skip
    overlap = trainer._session.meter.overlap
    end = overlap.end
    overlap.end = lambda: (end(), arrived.set())
    data, sampler = mx.nd.ones((STEPS * X, 8)), trainer.batch_sampler(STEPS * X)
    for step, batch in enumerate(gluon.data.DataLoader(data, batch_sampler=sampler)):
        arrived.set()
        if units == LARGE and 1 < step < STEPS - 1:
            arrived.clear()
        with autograd.record():
            loss = (net(batch) ** 2).sum()
        loss.backward()
        trainer.step(len(batch))
    trainer._session.flush()
    if trainer.kvstore.rank == 0:
        result(units, [line.hidden_seconds for line in read_run(folder).steps[2:-1]])


for units in (LARGE, SMALL):
    train(units, f"{sys.argv[1]}/{units}")
