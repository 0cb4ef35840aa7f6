"""Estimators that stop on workers' different metrics: ``mx_early_stopping.py [alone]``."""

import sys
from tempfile import TemporaryDirectory

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mxnet import gluon
from mxnet.gluon.contrib.estimator import BatchEnd, EarlyStoppingHandler, EpochEnd, Estimator
from report import result

from lbbsp_core import read_run

X, SAMPLES, EPOCHS = 8, 32, 12
LOSS = gluon.loss.L2Loss()
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 3)).astype("f4")
LABELS = FEATURES.sum(axis=1, keepdims=True) + rng.normal(size=(SAMPLES, 1)).astype("f4")
TRAINING = gluon.data.ArrayDataset(FEATURES, LABELS)
PARTS = [slice(0, 5), slice(5, SAMPLES)]  # of the validation: each worker's own


class Reads(EpochEnd):
    """Notes what handlers read."""

    def __init__(self):
        self.seen = []

    def epoch_end(self, estimator, *args, **kwargs):
        metrics = [*estimator.train_metrics, *estimator.val_metrics]
        self.seen.append([metric.get()[1] for metric in metrics])


class Ends(EpochEnd):
    """Ends the fit on worker 1 alone, after its third epoch."""

    def __init__(self, rank):
        self.rank, self.epochs = rank, 0

    def epoch_end(self, estimator, *args, **kwargs):
        self.epochs += 1
        return self.rank == 1 and self.epochs == 3


class Requests(BatchEnd):
    """Asks all workers to stop, from worker 1 and after its second step."""

    def __init__(self, rank):
        self.rank, self.steps = rank, 0

    def batch_end(self, estimator, *args, **kwargs):
        self.steps += 1
        if self.rank == 1 and self.steps == 2:
            estimator.trainer.request_stop()


def fit(part, *others, early=True, epochs=EPOCHS, validate=True, record=None):
    """Trains; returns the values that handlers have read at the ends of epochs, and the steps."""
    mx.random.seed(0)
    np.random.seed(0)
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize(mx.init.Xavier())
    trainer = lbbsp_mx.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.05}, global_batch_size=X, seed=3,
        record=record,
    )  # fmt: skip
    sampler = trainer.batch_sampler(SAMPLES)
    loader = gluon.data.DataLoader(TRAINING, batch_sampler=sampler)
    held = gluon.data.ArrayDataset(FEATURES[part] * 2, LABELS[part])
    validation = gluon.data.DataLoader(held, batch_size=4) if validate else None
    estimator = Estimator(net, LOSS, train_metrics=mx.metric.Loss(), trainer=trainer)
    estimator.logger.handlers.clear()
    reads = Reads()
    handlers = [lbbsp_mx.LoadBalancingHandler(), reads, *others]
    if early:
        handlers.append(EarlyStoppingHandler(estimator.val_metrics[0], mode="min"))
    estimator.fit(loader, validation, epochs=epochs, event_handlers=handlers)
    return reads.seen, trainer._session.step


def main():
    if sys.argv[1:]:
        result("early", fit(slice(0, SAMPLES)))
        return
    rank = lbbsp_mx.KVStore().rank
    result("early", fit(PARTS[rank]))
    with TemporaryDirectory() as record:
        given = {"early": False, "epochs": 2, "validate": rank == 0, "record": record}
        result("validated_by_one", fit(slice(0, SAMPLES), **given))
        if rank == 0:
            result("planned", [(each.event, each.steps) for each in read_run(record).events])
    ends = Ends(rank)
    result("ended_by_one", fit(PARTS[rank], ends, early=False)[1])
    result("requested", fit(PARTS[rank], Requests(rank), early=False)[1])


if __name__ == "__main__":
    main()
