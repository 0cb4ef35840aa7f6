"""Workers end their training at different steps: ``mx_quitting.py WAY``."""

import sys

import lbbsp_mx

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon
from mxnet.gluon.contrib.estimator import BatchEnd, Estimator

WAY = sys.argv[1]
X, STEPS, AT = 8, 60, 20

net = gluon.nn.Dense(1, in_units=3)
net.initialize(mx.init.One())
trainer = lbbsp_mx.Trainer(net.collect_params(), "sgd", global_batch_size=X)
rank = trainer.kvstore.rank
print(f"RANK {rank}", flush=True)
data = gluon.data.ArrayDataset(mx.nd.ones((X * STEPS, 3)), mx.nd.ones((X * STEPS, 1)))
loader = gluon.data.DataLoader(data, batch_sampler=trainer.batch_sampler(X * STEPS))
loss_of = gluon.loss.L2Loss()


class Quits(BatchEnd):
    """Ends worker 1 without an error."""

    def __init__(self):
        self.steps = 0

    def batch_end(self, estimator, *args, **kwargs):
        self.steps += 1
        if rank == 1 and self.steps == AT:
            exit()


if WAY == "handler":
    estimator = Estimator(net, loss_of, trainer=trainer)
    estimator.logger.handlers.clear()
    estimator.fit(loader, epochs=1, event_handlers=[lbbsp_mx.LoadBalancingHandler(), Quits()])
else:
    for step, (x, y) in enumerate(loader):
        if step == AT + 5 * rank:  # each worker would leave at a step of its own
            break
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(len(x))
print("END", flush=True)
