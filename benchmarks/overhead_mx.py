"""What do the Trainer and the store for MXNet cost where there is nothing to balance?

Two equal workers and a parameter server train the same network on the same samples in interleaved
blocks, in one set of processes: stock gluon on ``dist_sync`` with ``update_on_kvstore=False``, and
`lbbsp_mx.Trainer` with the policy `Even`, first one then the other by turns, through the same kind
of DataLoader. Printed: the ratio of the medians of the step times of neighbouring blocks, its
median over all pairs of blocks, with a 95 % bootstrap interval. Only the ratio means anything.
"""

from __future__ import annotations

import time

from side_by_side import main, report

X, SIDE, SAMPLES = 64, 40, 384


def train(blocks: int, steps: int, channels: int) -> None:
    """One of the workers; the first one prints."""
    import lbbsp_mx

    import mxnet as mx  # isort: skip
    import numpy as np
    from mxnet import autograd, gluon

    import lbbsp_core

    def network():
        mx.random.seed(0)
        nn, net = gluon.nn, gluon.nn.HybridSequential()
        for before in (1, channels, channels):
            net.add(nn.Conv2D(channels, 3, activation="relu", in_channels=before))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(10, in_units=channels))
        net.initialize(mx.init.Xavier())
        net.hybridize()
        return net

    class Plain(gluon.data.Sampler):
        """The same samples in the same order, without a plan."""

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
    nets = network(), network()
    options = {"learning_rate": 0.01}
    balanced = lbbsp_mx.Trainer(nets[1].collect_params(), "sgd", options, store,
                                global_batch_size=X, policy=lbbsp_core.Even())  # fmt: skip
    # Keys of the two must differ, and MXNet makes no second store.
    stock = gluon.Trainer(nets[0].collect_params(), "sgd", options, _Shifted(native),
                          update_on_kvstore=False)  # fmt: skip
    ahead = {"num_workers": 1, "thread_pool": True}  # both load while they compute
    sides = [
        ("stock", nets[0], stock, gluon.data.DataLoader(data, batch_sampler=Plain(), **ahead)),
        ("balanced", nets[1], balanced,
         gluon.data.DataLoader(data, batch_sampler=balanced.batch_sampler(SAMPLES), **ahead)),
    ]  # fmt: skip
    times = {"stock": [], "balanced": []}
    for block in range(blocks + 1):
        sides.reverse()  # what comes first meets another machine than what comes second
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
                    loss.wait_to_read()  # as a metric does
                    now = time.perf_counter()
                    seconds.append(now - last)
                    last = now
            mx.nd.waitall()
            if block:  # the first one warms up
                times[name].append(np.mean(seconds))
    if native.rank == 0:
        report("gluon", times["stock"], times["balanced"])


class _Shifted:
    """Stands before a native store, with keys of its own; hands everything else on."""

    def __new__(cls, native):
        from mxnet.kvstore import KVStoreBase

        class Shifted(KVStoreBase):
            type, rank, num_workers = native.type, native.rank, native.num_workers

            def broadcast(self, key, value, out, priority=0):
                native.broadcast(key + 100_000, value, out, priority)

            def pushpull(self, key, value, out=None, priority=0):
                native.pushpull(key + 100_000, value, out=out, priority=priority)

            @staticmethod
            def is_capable(capability):
                return False

        return Shifted()


if __name__ == "__main__":
    question = __doc__.splitlines()[0]
    main(__file__, question, train, framework="mxnet", blocks=30, channels=16)
