"""Measures the overhead of `lbbsp_mx.Trainer` on equal workers, where balancing has no benefit.

Two equal workers and a parameter server train the same network on the same samples in one set of
processes, in interleaved blocks: stock gluon on ``dist_sync`` with ``update_on_kvstore=False``, and
`lbbsp_mx.Trainer` with the policy `Even`, both with the same kind of DataLoader. The order of the
two alternates. Prints the ratio of their mean step times, as the median over all pairs of blocks
with a 95 % bootstrap interval. Absolute times depend on the machine and its load.
"""

from __future__ import annotations

import time

from side_by_side import main, report

X, SAMPLES = 64, 384


def train(blocks: int, steps: int, channels: int) -> None:
    """Trains as one of the workers; rank 0 prints."""
    import lbbsp_mx

    import mxnet as mx  # isort: skip
    import numpy as np
    from mxnet import autograd, gluon
    from networks_mx import SIDE, convolutional

    import lbbsp_core

    class Plain(gluon.data.Sampler):
        """Draws the same samples in the same order, without a plan."""

        def __iter__(self):
            for step in range(order.steps_per_epoch):
                yield order.slice(step, native.rank, (X // 2, X // 2)).tolist()

        def __len__(self):
            return order.steps_per_epoch

    native = mx.kv.create("dist_sync")
    rng = np.random.default_rng(0)
    images = rng.normal(size=(SAMPLES, 1, SIDE, SIDE)).astype("f4")
    data = gluon.data.ArrayDataset(images, rng.integers(0, 10, SAMPLES).astype("f4"))
    order = lbbsp_core.GlobalOrder(SAMPLES, X, shuffle=False)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    store = lbbsp_mx.KVStore(native)
    nets = convolutional(channels), convolutional(channels)
    options = {"learning_rate": 0.01}
    balanced = lbbsp_mx.Trainer(nets[1].collect_params(), "sgd", options, store,
                                global_batch_size=X, policy=lbbsp_core.Even())  # fmt: skip
    stock = gluon.Trainer(nets[0].collect_params(), "sgd", options, native,
                          update_on_kvstore=False)  # fmt: skip
    ahead = {"num_workers": 1, "thread_pool": True}  # both load data while they compute
    sides = [
        ("stock", nets[0], stock, gluon.data.DataLoader(data, batch_sampler=Plain(), **ahead)),
        ("balanced", nets[1], balanced,
         gluon.data.DataLoader(data, batch_sampler=balanced.batch_sampler(SAMPLES), **ahead)),
    ]  # fmt: skip
    times = {"stock": [], "balanced": []}
    for block in range(blocks + 1):
        sides.reverse()  # the load of the machine may depend on the position in the pair
        for name, net, trainer, loader in sides:
            seconds = []
            for _ in range(steps // order.steps_per_epoch):
                last = time.perf_counter()
                for x, y in loader:
                    x, y = x.as_in_context(mx.cpu()), y.as_in_context(mx.cpu())
                    with autograd.record():
                        loss = loss_of(net(x), y)
                    loss.backward()
                    trainer.step(X if trainer is stock else len(x))
                    loss.wait_to_read()  # as a metric would
                    now = time.perf_counter()
                    seconds.append(now - last)
                    last = now
            mx.nd.waitall()
            if block:  # the first block is a warm-up
                times[name].append(np.mean(seconds))
    if native.rank == 0:
        report("stock gluon", times["stock"], times["balanced"])


if __name__ == "__main__":
    question = __doc__.splitlines()[0]
    main(__file__, question, train, framework="mxnet", blocks=30, channels=16)
