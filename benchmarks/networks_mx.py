"""Network that benchmarks of gluon train, with few weights and much computation per sample."""

from __future__ import annotations

import mxnet as mx
from mxnet import gluon

SIDE = 40


def convolutional(channels: int) -> gluon.nn.HybridSequential:
    """Returns a seeded network whose cost per sample grows with the square of `channels`."""
    mx.random.seed(0)
    nn, net = gluon.nn, gluon.nn.HybridSequential()
    for before in (1, channels, channels):
        net.add(nn.Conv2D(channels, 3, activation="relu", in_channels=before))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(10, in_units=channels))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net
