"""Trains with a policy and a synchroniser that lbbsp does not know: ``mx_custom.py FOLDER``."""

import sys

import lbbsp_mx

from custom_schemes import PeriodicBarrier, Ranked  # isort: skip
from mx_async import SAMPLES, SEED, X, backward, network
from report import result
from virtual_time import VirtualTime

from lbbsp_core import Ema

EPOCHS, RATIO, PERIOD = 2, 0.5, 2
SECONDS = (0.001, 0.003, 0.0018)  # for a sample, by rank
net = network(0)
trainer = lbbsp_mx.AsyncTrainer(
    net.collect_params(), "sgd", {"learning_rate": 0.1}, sync=PeriodicBarrier(PERIOD),
    global_batch_size=X, policy=Ranked(RATIO), predictor=Ema(0.5), record=sys.argv[1], seed=SEED,
)  # fmt: skip
time = VirtualTime(trainer._session._meter)
drawn = []
for samples in trainer.batch_sampler(SAMPLES, epochs=EPOCHS):
    drawn += samples
    backward(net, samples)
    time.compute(SECONDS[trainer.rank] * len(samples))
    trainer.step(len(samples), ignore_stale_grad=True)
trainer.finish()
result("drawn", drawn)
