"""Uses the store as scripts use MXNet's own, and reports what each worker reads."""

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from report import answer_all, result

from lbbsp_core import FixedShares

SHAPE = (2, 3)
store = lbbsp_mx.KVStore("dist")
rank, workers = store.rank, store.num_workers


def full(value, shape=SHAPE):
    return mx.nd.full(shape, value)


def values(*arrays):
    """The value that fills each array."""
    for array in arrays:
        assert (array.asnumpy() == array.asnumpy().flat[0]).all()
    return [float(array.asnumpy().flat[0]) for array in arrays]


def sums():
    """Reads each sum before the next push of its key, since MXNet does not keep these in order."""
    store.init(["a", "b"], [full(rank + 1), full(rank + 5)])  # of worker 0: 1 and 5
    started = [full(0), full(0)]
    store.pull(["a", "b"], out=started)
    read = values(*started)
    seven, mine = full(7), [full(rank + 1), full(10 * (rank + 1))]
    store.pushpull("a", seven)
    read += values(seven)
    store.pushpull(["a", "b"], mine)
    read += values(*mine)
    pushed = full(0)
    store.push("b", full(2.0**rank))
    store.pull("b", out=pushed)
    return read + values(pushed)


def sent_again():
    out = []
    for number in range(3):
        array = full(np.nan if rank else 100 * number)  # only the values of worker 0 count
        store.broadcast("again", array, out=array)
        out.append(array)
    return values(*out)


def rows():
    """Pulls rows of a sparse sum: worker i pushes i + 1 to row i."""
    store.init("rows", mx.nd.ones((4, 2)).tostype("row_sparse"))
    mine = np.zeros((4, 2), "f4")
    mine[rank] = rank + 1
    store.push("rows", mx.nd.array(mine).tostype("row_sparse"))
    pulled = mx.nd.zeros((4, 2)).tostype("row_sparse")
    store.row_sparse_pull("rows", out=pulled, row_ids=mx.nd.array([0, 2]))
    return pulled.asnumpy()[:, 0].tolist()


def shared_with_a_trainer():
    """The keys of each trainer are its own, and so are those of a second store."""
    for _ in range(2):
        params = gluon_network().collect_params()
        lbbsp_mx.Trainer(params, "sgd", kvstore=store, global_batch_size=2 * workers)
    second = lbbsp_mx.KVStore()
    second.init(0, full(40))
    store_value, second_value = full(0), full(0)
    store.pull("a", out=store_value)
    second.pull(0, out=second_value)
    return values(store_value, second_value)


def summed_after_a_step():
    """Gradients are weighted by batch sizes, and what the script pushes is not."""
    net = gluon_network()
    plan = FixedShares(range(1, workers + 1))
    trainer = lbbsp_mx.Trainer(
        net.collect_params(), "sgd", kvstore=store, global_batch_size=4 * workers, policy=plan
    )
    size = trainer.rows.stop - trainer.rows.start
    with mx.autograd.record():
        loss = net(mx.nd.ones((size, 3)))
    loss.backward()
    trainer.step(size)
    seven = full(7)
    store.pushpull("a", seven)
    return [size, *values(seven)]


def gluon_network():
    net = mx.gluon.nn.Dense(2, in_units=3)
    net.initialize()
    return net


def on_the_servers():
    """SGD on the servers with a factor of one key: 10 - 0.5 * sum, and half of it."""
    optimizer = mx.optimizer.SGD(learning_rate=0.5, wd=0.0, param_idx2name={3: "w", 4: "half"})
    optimizer.set_lr_mult({"half": 0.5})
    served = lbbsp_mx.KVStore()
    served.init([3, 4], [full(10), full(10)])
    served.set_optimizer(optimizer)
    served.push([3, 4], [full(rank + 1), full(rank + 1)])
    out = [full(0), full(0)]
    served.pull([3, 4], out=out)
    gathered = store._collectives.all_gather([rank, 7])  # keys of this package are not updated
    return [*values(*out), gathered == [[each, 7] for each in range(workers)]]


MISUSE = {
    "another_order": lambda: store.init(f"key{rank}", full(0)),
    "other_calls": lambda: (store.init if rank else lambda *a: store.broadcast(*a, full(0)))(
        "z", full(0)
    ),
    "second_init": lambda: store.init("a", full(0)),
    "half_known": lambda: store.broadcast(["a", "new"], [full(0)] * 2, out=[full(0)] * 2),
    "unknown": lambda: store.push("nowhere", full(0)),
    "large_key": lambda: store.init(123_456, full(0)),
    "with_trainer": lambda: store.set_gradient_compression({"type": "2bit", "threshold": 0.5}),
}

for case in (sums, sent_again, rows, shared_with_a_trainer, summed_after_a_step):
    result(case.__name__, case())
result("created", [type(mx.kv.create(name)).__name__ for name in ("lbbsp", "lbbsp_dist_sync")])
answer_all(MISUSE)
result("on_the_servers", on_the_servers())
answer_all({"updated": lambda: store.broadcast("a", full(0), out=full(0))})
