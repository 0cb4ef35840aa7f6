"""Trains a gluon network on three unequal workers: ``mx_unequal.py FOLDER CASE...``."""

import os
import sys
from pathlib import Path

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from custom_schemes import Ranked
from mxnet import autograd, gluon
from report import result
from virtual_time import Unequal

X, STEPS, SHORT = 48, 6, 13  # samples of a step, whole steps of an epoch, samples of its last step
SAMPLES = np.random.default_rng(0).normal(size=(STEPS * X + SHORT, 9)).astype("f4")
SECONDS = (0.002, 0.002, 0.005)  # for a sample, by rank
CASES = {
    "even": (SECONDS, {"policy": "observe"}),
    "balanced": (SECONDS, {}),
    "own_policy": ((0.001, 0.003, 0.0018), {"policy": Ranked(0.5)}),
}


def train(folder, seconds, options):
    """Trains two epochs; returns the samples that this worker draws in each step."""
    mx.random.seed(0)
    net = gluon.nn.Dense(1, in_units=8)
    net.initialize()
    trainer = lbbsp_mx.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.01}, global_batch_size=X, record=folder,
        metrics_file=folder / "job.prom", **options
    )  # fmt: skip
    compute = Unequal(trainer._session, seconds, folder)
    data = gluon.data.ArrayDataset(np.arange(len(SAMPLES)), SAMPLES)
    sampler = trainer.batch_sampler(len(data), seed=3)
    drawn, loss_of = [], gluon.loss.L2Loss()
    for _ in range(2):
        for numbers, batch in gluon.data.DataLoader(data, batch_sampler=sampler):
            drawn.append(numbers.asnumpy().tolist())
            with autograd.record():
                loss = loss_of(net(batch[:, :8]), batch[:, 8:])
            loss.backward()
            compute()
            trainer.step(len(batch))
    trainer._session.close()  # writes what is recorded
    return drawn


for name in sys.argv[2:]:
    folder = Path(sys.argv[1], name)
    os.makedirs(folder, exist_ok=True)
    result(name, train(folder, *CASES[name]))
