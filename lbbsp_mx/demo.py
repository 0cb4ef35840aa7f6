"""Worker of ``lbbsp demo --framework mxnet``: trains a small CNN on handwritten digits.

``lbbsp demo`` starts it once with the policy ``bsp`` (even batches) and once with ``lbbsp``. Both
runs use the same samples in the same order and the same initial weights. They differ only in time
and in rounding, because sums are computed in a different order.
"""

from __future__ import annotations

from typing import Any

import lbbsp_mx  # before mxnet: restores the name that mxnet needs in NumPy

import mxnet as mx  # isort: skip
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon

from lbbsp_core.demo.digits import GLOBAL_BATCH_SIZE, SEED, digits, parse, repeated, save


def main() -> None:
    """Trains as one of the workers; rank 0 writes the record and the result to the run folder."""
    arguments = parse(__doc__)
    training, held_out = digits()
    data = repeated(training, arguments.steps)
    net = build()
    trainer = lbbsp_mx.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9},
        global_batch_size=GLOBAL_BATCH_SIZE, policy=arguments.policy, record=arguments.run_dir,
    )  # fmt: skip
    loader = gluon.data.DataLoader(
        gluon.data.ArrayDataset(channels_first(data.x), data.y.astype(np.float32)),
        batch_sampler=trainer.batch_sampler(len(data.y), seed=SEED),
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for x, y in loader:
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(len(x))
    if trainer.kvstore.rank == 0:
        weights = [p.data().asnumpy() for p in net.collect_params().values()]
        logits = net(mx.nd.array(channels_first(held_out.x))).asnumpy()
        save(arguments.run_dir / "final.npz", logits, held_out, weights)


def channels_first(images: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns images in the layout of MXNet's convolutions, channels first."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def build() -> gluon.nn.HybridSequential:
    """Builds a CNN with few weights and much computation, about 2 ms per sample on one core.

    With smooth activations, average pooling and SGD, differences in the rounding of float32 sums,
    which depends on the batch sizes, do not grow over the steps.
    """
    nn = gluon.nn
    mx.random.seed(SEED)
    np.random.seed(SEED)
    net = nn.HybridSequential()
    net.add(
        nn.HybridLambda(lambda F, x: F.UpSampling(x, scale=4, sample_type="nearest")),
        nn.Conv2D(64, 3, padding=1, in_channels=1, activation="tanh"),
        nn.Conv2D(64, 3, padding=1, in_channels=64, activation="tanh"),
        nn.AvgPool2D(2),
        nn.Conv2D(64, 3, padding=1, in_channels=64, activation="tanh"),
        nn.AvgPool2D(4),
        nn.Dense(10, in_units=1024),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


if __name__ == "__main__":
    main()
