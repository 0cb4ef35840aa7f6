"""Names that the documents about gluon use without a definition, for one process."""

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon.data import DataLoader

epochs = 2
random = np.random.default_rng(0)
features = random.normal(size=(600, 3)).astype("float32")
dataset = gluon.data.ArrayDataset(features, features.sum(axis=1))
photos, paintings = gluon.data.ArrayDataset(features), gluon.data.ArrayDataset(-features)
lengths = random.integers(1, 9, size=len(features))


def network(units):
    net = gluon.nn.Dense(units, in_units=3)
    net.initialize(mx.init.Xavier())
    return net


net, generator, discriminator = network(1), network(3), network(1)
loss_fn = gluon.loss.L2Loss()
trainer = lbbsp_mx.Trainer(
    net.collect_params(), "sgd", {"learning_rate": 0.01}, global_batch_size=256
)
sampler = trainer.batch_sampler(len(dataset), seed=0)
loader = DataLoader(dataset, batch_sampler=sampler)
