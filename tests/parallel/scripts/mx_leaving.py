"""Trains on two data sets by turns, a worker being slow to predict, and ends at once."""

import sys
import time
from dataclasses import dataclass

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mx_parts import weights
from mxnet import autograd, gluon
from report import result

from lbbsp_core import LastValue

X, SAMPLES = 8, 32
LOSS = gluon.loss.L2Loss()


@dataclass(frozen=True)
class Slow(LastValue):
    """Still predicts when the sums of the gradients are long there."""

    seconds: float = 0.1

    def predict(self, state, drivers=(), horizon=1):
        time.sleep(self.seconds)
        return super().predict(state, drivers, horizon)


def main():
    store = lbbsp_mx.KVStore()
    mx.random.seed(store.rank)
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize()
    trainer = lbbsp_mx.Trainer(net.collect_params(), "sgd", kvstore=store, global_batch_size=X,
                               predictor=Slow() if store.rank == 1 else LastValue())  # fmt: skip
    data = gluon.data.ArrayDataset(np.ones((SAMPLES, 3), "f4"), np.ones((SAMPLES, 1), "f4"))
    ahead = {"num_workers": 1, "thread_pool": True}
    loaders = [
        gluon.data.DataLoader(data, batch_sampler=trainer.batch_sampler(SAMPLES, seed), **ahead)
        for seed in (0, 1)
    ]
    for epoch in range(2):
        for loader in loaders:
            for x, y in loader:
                with autograd.record():
                    loss = LOSS(net(x), y)
                loss.backward()
                trainer.step(len(x))
            if store.rank == 0 and epoch == 0:
                time.sleep(0.3)  # evaluates
    result("weights", [float(w.sum()) for w in weights(net)])
    if len(sys.argv) > 1:
        sys.exit(int(sys.argv[1]))


if __name__ == "__main__":
    main()
