"""Trains by Module.fit on a balanced store, and compares with Module in one process.

``mx_module.py DIR``: in DIR, each worker writes its checkpoints, and worker 0 run records.
"""

import sys
from functools import partial
from itertools import chain, islice

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mx_parts import let_gathers_take
from report import answer_all, result
from virtual_time import VirtualTime

from lbbsp_core import Even, GlobalOrder
from lbbsp_core.testing import ChangingPlans

folder, SAMPLES, EPOCHS = sys.argv[1], 79, 3
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(SAMPLES, 6)).astype("f4")
LABELS = rng.integers(0, 3, SAMPLES).astype("f4")
OPTIMIZER = {"learning_rate": 0.2, "momentum": 0.9, "wd": 0.01}
store = lbbsp_mx.KVStore("dist_sync")
rank = store.rank
DIVISIBLE = ChangingPlans(((16, 5, 3), (4, 18, 2), (8, 8, 8), (1, 9, 14)))  # of 24 samples
INDIVISIBLE = ChangingPlans(((16, 5, 4), (4, 18, 3), (9, 8, 8)))  # of 25


def network(normalization="null"):
    data = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=8, name="hidden")
    data = mx.sym.Activation(data, act_type="tanh")
    data = mx.sym.FullyConnected(data, num_hidden=3, name="output")
    return mx.sym.SoftmaxOutput(data, name="softmax", normalization=normalization)


def arrays(batch_size, shuffle=False, last="pad"):
    return mx.io.NDArrayIter(FEATURES, LABELS, batch_size, shuffle, last)


def options(**more):
    schedule = mx.lr_scheduler.FactorScheduler(step=3, factor=0.7, base_lr=0.2)
    return {**OPTIMIZER, "lr_scheduler": schedule, **more}


def fit(train, kvstore, normalization="null", **more):
    """Trains from weights that differ between the workers; those of worker 0 count."""
    module = mx.mod.Module(network(normalization), context=more.pop("context", mx.cpu()))
    mx.random.seed(7 + rank)
    params = more.pop("optimizer_params", None) or options()
    module.fit(
        train,
        kvstore=kvstore,
        optimizer_params=params,
        initializer=mx.init.Uniform(0.5),
        num_epoch=EPOCHS,
        **more,
    )
    return module


def alone(steps, size, normalization="null", **more):
    """Trains in this process, without a store, on whole global batches; a short one is a mean."""
    module = mx.mod.Module(network(normalization))
    shapes = [("data", (size, 6))], [("softmax_label", (size,))]
    module.bind(*shapes)
    mx.random.seed(7)
    module.init_params(mx.init.Uniform(0.5))
    module.init_optimizer(None, optimizer_params=options(**more))
    rescale = module._optimizer.rescale_grad
    for index in steps:
        short = 1 if normalization == "batch" else size / len(index)
        module._optimizer.rescale_grad = rescale * short
        data, label = mx.nd.array(FEATURES[index]), mx.nd.array(LABELS[index])
        module.forward_backward(mx.io.DataBatch([data], [label]))
        module.update()
    return module


def steps_of(size, seed, shuffle=True, drop_last=False):
    order = GlobalOrder(SAMPLES, size, seed, shuffle=shuffle, drop_last=drop_last)
    return [order.indices(step) for step in range(EPOCHS * order.steps_per_epoch)]


def report(name, module, steps, size, *args, **more):
    """Reports weights, and on worker 0 their largest difference from one process, relative."""
    weights = {key: value.asnumpy() for key, value in module.get_params()[0].items()}
    result(f"{name}_weights", {key: value.tolist() for key, value in weights.items()})
    if rank == 0:
        expected = alone(steps, size, *args, **more).get_params()[0]
        errors = [
            np.abs(weights[key] - value.asnumpy()).max() / np.abs(value.asnumpy()).max()
            for key, value in expected.items()
        ]
        result(f"{name}_error", max(errors))


def whole_script():
    """Everything that a legacy script gives `fit`, in the order of the arrays, then once more."""
    sizes, ended = [], []
    train = store.balance(arrays(8), policy=DIVISIBLE, record=f"{folder}/run.jsonl")
    (shown,) = train.provide_data
    result("shapes", [train.batch_size, list(shown.shape), shown.name])
    prefix = f"{folder}/model-{rank}"

    def ends(epoch, symbol, arg_params, aux_params):
        ended.append(epoch)

    module = fit(
        train,
        store,
        eval_data=arrays(16),
        eval_metric=["acc", "ce"],
        batch_end_callback=[
            mx.callback.Speedometer(8, 2),
            lambda params: sizes.append(params.locals["data_batch"].data[0].shape[0]),
        ],
        epoch_end_callback=[mx.callback.do_checkpoint(prefix), ends],
    )
    report("whole_script", module, steps_of(24, 0, shuffle=False), 24)
    loaded = mx.model.load_checkpoint(prefix, EPOCHS)[1]
    pairs = [(loaded[key], value) for key, value in module.get_params()[0].items()]
    result("loaded", all((ours == its).asnumpy().all() for ours, its in pairs))
    result("sizes", sizes)
    result("epochs", ended)
    module.fit(train, kvstore=store, num_epoch=1)  # continues
    order = GlobalOrder(SAMPLES, 24, shuffle=False)
    more = [order.indices(step) for step in range(order.steps_per_epoch)]
    report("continued", module, steps_of(24, 0, shuffle=False) + more, 24)


def means():
    """Another module and store, whose keys have other numbers; X is no multiple of the workers."""
    other = lbbsp_mx.KVStore("dist_sync")
    train = other.balance(
        FEATURES, LABELS, global_batch_size=25, seed=3, mean_loss=True, policy=INDIVISIBLE
    )
    module = fit(train, other, "batch")
    report("means", module, steps_of(25, 3), 25, "batch")


def sums():
    """As `means`, with sums; the iterator is resized, and does not tell the end of its epochs."""
    other = lbbsp_mx.KVStore("dist_sync")
    train = other.balance(FEATURES, LABELS, global_batch_size=25, seed=4, policy=INDIVISIBLE)
    module = fit(mx.io.ResizeIter(train, 4), other)
    report("sums", module, steps_of(25, 4), 25)


def shuffled():
    """Each worker's NDArrayIter has shuffled differently; the script divides gradients itself."""
    np.random.seed(rank)
    other = lbbsp_mx.KVStore("dist_sync")
    train = other.balance(arrays(8, shuffle=True), seed=5, policy=DIVISIBLE)
    module = fit(train, other, optimizer_params=options(rescale_grad=0.01))
    report("shuffled", module, steps_of(24, 5), 24, rescale_grad=0.01)


def devices():
    """Each worker has two devices, and at least one sample for each, also in the short step."""
    other = lbbsp_mx.KVStore("dist_sync")
    policy = ChangingPlans(((16, 5, 3), (2, 18, 4)))
    train = other.balance(arrays(8), policy=policy, devices=2)
    module = fit(train, other, context=[mx.cpu(0), mx.cpu(1)])
    report("devices", module, steps_of(24, 0, shuffle=False), 24)


def discarded():
    """Short last steps are left out, and a callback pulls weights."""
    other, out = lbbsp_mx.KVStore("dist_sync"), mx.nd.zeros(8)
    train = other.balance(arrays(8, last="discard"), policy=DIVISIBLE)
    pull = partial(other.pull, "hidden_bias", out=out)
    module = fit(train, other, batch_end_callback=lambda _: pull())
    report("discarded", module, steps_of(24, 0, shuffle=False, drop_last=True), 24)


def slow():
    """The third worker computes for longer in every step."""
    other = lbbsp_mx.KVStore("dist_sync")
    train = other.balance(arrays(4), policy=Even(), record=f"{folder}/slow.jsonl")
    session = other._steps.session
    computed = VirtualTime(session.meter)
    let_gathers_take(1.0, computed, session.collectives)

    def compute(_):
        session.finish_barrier()  # what follows belongs to the next step
        computed.compute(0.1 * (rank == 2))

    mx.mod.Module(network()).fit(train, kvstore=other, num_epoch=1, batch_end_callback=compute)


def peeks():
    """Reads a batch before the training, which is drawn again."""
    train = store.balance(arrays(8), policy=DIVISIBLE)
    first = next(train).data[0].asnumpy()
    train.reset()
    return bool((next(train).data[0].asnumpy() == first).all())


def balanced(**more):
    return store.balance(**{"data": arrays(8), **more})


def unused():
    mx.mod.Module(network()).fit(balanced(), kvstore="local", num_epoch=1)


def prefetched():
    mx.mod.Module(network()).fit(mx.io.PrefetchingIter(balanced()), kvstore=None, num_epoch=1)


def left_early():
    """Leaves the loop in its second step, and trains on batches of another iterator."""
    other = lbbsp_mx.KVStore("dist_sync")
    train, module = other.balance(arrays(8)), mx.mod.Module(network())
    module.bind(train.provide_data, train.provide_label)
    module.init_params()
    module.init_optimizer(other)
    for batch in chain(islice(train, 2), arrays(8)):
        module.forward_backward(batch)
        module.update()


def more_devices():
    module = mx.mod.Module(network(), context=[mx.cpu(0), mx.cpu(1)])
    other = lbbsp_mx.KVStore("dist_sync")
    module.fit(other.balance(arrays(8)), kvstore=other, num_epoch=1)


def replaced():
    train = balanced()
    balanced()
    next(train)


def other_arrays():
    return mx.io.NDArrayIter(FEATURES[rank:], LABELS[rank:], 8, shuffle=True)


MISUSE = {
    "other_seed": lambda: balanced(shuffle=True, seed=rank),
    "other_size": lambda: balanced(global_batch_size=24 + rank),
    "other_handle": lambda: balanced(data=arrays(8, last="discard" if rank else "pad")),
    "other_data": lambda: balanced(data=mx.io.NDArrayIter(FEATURES + rank, LABELS, 8)),
    "other_shuffled": lambda: balanced(data=other_arrays()),
    "in_workers": lambda: mx.kv.create("lbbsp").balance(arrays(8)),
    "unused": unused,
    "prefetched": prefetched,
    "left_early": left_early,
    "more_devices": more_devices,
    "replaced": replaced,
    "compressed": lambda: store.set_gradient_compression({"type": "2bit", "threshold": 0.5}),
}

for case in (whole_script, means, sums, shuffled, devices, discarded, slow):
    case()
result("peeks", peeks())
answer_all(MISUSE, MISUSE)
