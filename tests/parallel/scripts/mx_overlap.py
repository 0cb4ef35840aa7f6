"""Trains networks whose backward pass rests below the top layer: ``mx_overlap.py FOLDER``."""

import sys
import time

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from leads import Leads
from mxnet import autograd, gluon
from report import result

from lbbsp_core import read_run

RESTS = 0.2  # seconds
LARGE, SMALL = 512, 8  # units below a top layer of 2 MiB, and of a few bytes


class Rest(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        time.sleep(RESTS)
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("rest")
class RestProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Rest()


class Rests(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.Custom(x, op_type="rest")


def train(units, folder):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(units, in_units=8), Rests(), gluon.nn.Dense(2 * units, in_units=units))
    net.initialize(mx.init.Xavier())
    trainer = lbbsp_mx.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.01}, global_batch_size=8, policy="bsp",
        record=folder,
    )  # fmt: skip
    leads = Leads(trainer._session.meter)
    x = mx.nd.array(np.random.default_rng(0).normal(size=(64, 8)))
    for batch in gluon.data.DataLoader(x, batch_sampler=trainer.batch_sampler(64)):
        with autograd.record():
            loss = (net(batch) ** 2).sum()
        loss.backward()
        trainer.step(len(batch))
    trainer._session.flush()
    if trainer.kvstore.rank == 0:
        hidden = [line.hidden_seconds for line in read_run(folder).last_half()]
        result(folder, {"hidden": hidden, "sent": leads.sent[2:], "summed": leads.summed[2:]})


for units in (LARGE, SMALL):
    train(units, f"{sys.argv[1]}/{units}")
