"""Idioms of gluon scripts on uneven, changing batches, each beside one process with all samples."""

from contextlib import suppress
from itertools import islice

import lbbsp_mx

import mxnet as mx  # isort: skip
import numpy as np
from mx_parts import Warnings, largest, weights
from mxnet import autograd, gluon, nd
from mxnet.gluon.utils import clip_global_norm
from report import answer_all, result

from lbbsp_core.policy import Even
from lbbsp_core.testing import ChangingPlans

X, TOKENS, WORDS = 48, 5, 12
SAMPLES = 3 * X + 22  # a short last step, which four does not divide
EPOCHS = 2
rng = np.random.default_rng(0)
IDS = rng.integers(0, WORDS, (SAMPLES, TOKENS)).astype("f4")
LABELS = rng.integers(0, 3, (SAMPLES, TOKENS)).astype("f4")
# Padding grows with the number of the sample and of the word: a mean over samples is another one.
MASK = (rng.random((SAMPLES, TOKENS)) < np.linspace(0.9, 0.2, SAMPLES)[:, None]).astype("f4")
MASK[IDS == WORDS - 1] = 0  # a word of which only the momentum and decay change the row
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
SGD = {"learning_rate": 0.5, "momentum": 0.9, "wd": 1e-2}


class Table(gluon.nn.Block):
    """An embedding whose weight is row-sparse itself, and not its gradient alone."""

    def __init__(self):
        super().__init__()
        options = {"shape": (WORDS, 6), "stype": "row_sparse", "grad_stype": "row_sparse"}
        self.weight = self.params.get("weight", **options)

    def forward(self, ids):
        chosen = nd.one_hot(ids.reshape(-1), WORDS).tostype("csr")
        rows = nd.sparse.dot(chosen, self.weight.row_sparse_data(ids.reshape(-1)))
        return rows.reshape((*ids.shape, 6))


def values(net):
    """All parameters; a row-sparse one tells its rows through its trainer."""
    rows = nd.arange(WORDS)
    return [
        (p.data() if p._stype == "default" else p.row_sparse_data(rows)).asnumpy()
        for p in net.collect_params().values()
    ]


class Case:
    """One way to train."""

    def __init__(self, clip=None, mean=False, parts=1, devices=1, sparse=False, table=False,
                 weighted=False, few=False, loader=None, norm=None, skips=False):  # fmt: skip
        self.clip, self.mean, self.parts, self.devices = clip, mean, parts, devices
        self.norm, self.skips = norm, skips  # largest global norm; whether larger ones are left out
        self.sparse, self.table, self.weighted = sparse, table, weighted
        self.few, self.loader = few, loader or {}
        self.mask = MASK * (IDS[:, :1] < 2) if few else MASK  # some workers have no valid token
        self.data = gluon.data.ArrayDataset(IDS, LABELS, self.mask)
        self.stale = {}

    def layers(self):
        return [Table() if self.table else gluon.nn.Embedding(WORDS, 6, sparse_grad=self.sparse),
                gluon.nn.Dense(3, in_units=6, flatten=False)]  # fmt: skip

    def network(self, seed, contexts):
        mx.random.seed(seed)
        net = gluon.nn.Sequential()
        net.add(*self.layers())
        net.initialize(mx.init.Uniform(0.7), ctx=contexts)
        if self.parts > 1:
            net.collect_params().setattr("grad_req", "add")
        return net

    def loss(self, net, ids, labels, mask, mean):
        """Sums over the tokens of each sample, or their mean over the samples or valid tokens."""
        if self.weighted:
            losses = LOSS(net(ids), labels, mask.expand_dims(2)) * TOKENS
            return losses.sum() / mask.sum() if mean else losses
        losses = LOSS(net(ids), labels)
        return losses.mean() if mean else losses

    def backward(self, net, batch, contexts, mean=False):
        loaded = [gluon.utils.split_and_load(part, contexts) for part in batch]  # even_split
        with autograd.record():
            losses = [self.loss(net, *parts, mean) for parts in zip(*loaded, strict=True)]
        autograd.backward(losses)


class Heads(Case):
    """Two tasks with an embedding and a head each: few batches have samples of the second one."""

    def __init__(self, **options):
        super().__init__(**options)
        self.stale = {"ignore_stale_grad": True}

    def layers(self):
        return [*super().layers(), *super().layers()]

    def loss(self, net, ids, labels, mask, mean):
        first, losses = ids.asnumpy(), []
        second = (first[:, 0] == 3) & (first[:, 1] < 4)
        for task in (0, 1):
            if len(rows := np.flatnonzero(second == task)):
                x, y = (nd.take(each, nd.array(rows, ctx=ids.context)) for each in (ids, labels))
                losses.append(LOSS(net[2 * task + 1](net[2 * task](x)), y))
        losses = nd.concat(*losses, dim=0)
        return losses.mean() if mean else losses


CASES = {
    "clipped": Case(clip=0.02),
    "clipped_mean_loss": Case(clip=0.02, mean=True),
    "accumulated": Case(parts=2),
    "accumulated_ahead": Case(parts=3, clip=0.02, loader={"num_workers": 2, "thread_pool": True}),
    "devices": Case(devices=2),
    "devices_accumulated": Case(devices=2, parts=2),
    "sparse": Case(sparse=True),
    "sparse_devices": Case(sparse=True, clip=0.02, devices=2),
    "sparse_parameter": Case(sparse=True, table=True),
    "sparse_parameter_devices": Case(sparse=True, table=True, clip=0.02, devices=2),
    "heads": Heads(),
    "heads_clipped": Heads(clip=0.02, mean=True),
    "heads_accumulated": Heads(parts=2),
    "heads_devices": Heads(devices=2),
    "heads_sparse": Heads(sparse=True, clip=0.02, devices=2),
    "norm": Case(norm=5),
    "norm_mean_loss": Case(norm=0.12, mean=True),
    "norm_skipped": Case(norm=7, skips=True),
    "norm_accumulated": Case(norm=5, parts=2),
    "norm_devices": Case(norm=5, devices=2),
    "norm_of_sparse": Case(norm=5, sparse=True, table=True),
    "norm_of_heads": Heads(norm=5),
    "weighted": Case(weighted=True),
    "weighted_mean_loss": Case(weighted=True, mean=True, clip=0.02),
    "weighted_accumulated": Case(weighted=True, parts=2),
    "few_tokens": Case(weighted=True, mean=True, few=True),
    "few_tokens_sparse": Case(weighted=True, mean=True, few=True, sparse=True),
}


def gradients(net, context):
    return [param.grad(context) for param in net.collect_params().values()]


def clip(net, contexts, largest):
    """Clips as scripts do, on each device; only some of the mean gradients are larger."""
    for context in contexts:
        for array in gradients(net, context):
            nd.clip(array, -largest, largest, out=array)


def limit_norm(net, case, contexts):
    """Clips by the global norm before a step; returns whether the step is to be left out."""
    norms = [clip_global_norm(gradients(net, context), case.norm) for context in contexts]
    return case.skips and norms[0] > case.norm


def make(net, **options):
    options = {"global_batch_size": X, "policy": ChangingPlans(), "kvstore": store, **options}
    params = net.collect_params()
    return lbbsp_mx.Trainer(params, "sgd", dict(SGD), **options)


def together(case):
    """Trains on all workers; worker 0 alone has several devices."""
    contexts = [mx.cpu(i) for i in range(case.devices if rank == 0 else 1)]
    net = case.network(1 + rank, contexts)  # worker 0's weights are to count
    trainer = make(net, mean_loss=case.mean, accumulate=case.parts)
    if case.table and rank > 0:  # changed since the trainer was created: worker 0's count again
        net[0].weight.set_data(nd.ones((WORDS, 6)).tostype("row_sparse"))
    sampler = trainer.batch_sampler(SAMPLES, seed=0)
    sizes, steps = set(), 0
    for _ in range(EPOCHS):
        batches = iter(gluon.data.DataLoader(case.data, batch_sampler=sampler, **case.loader))
        while parts := list(islice(batches, case.parts)):
            local = sum(len(part[0]) for part in parts)
            total = sum(trainer.sizes)
            sizes.add(local)
            for part in parts:
                case.backward(net, part, contexts, case.mean)
            weight = sum(float(mask.sum().asscalar()) for *_, mask in parts)
            weight = {"weight": weight} if case.weighted else {}
            if case.clip:
                trainer.allreduce_grads(**weight)
                clip(net, contexts, case.clip)
                trainer.update((1, local, total)[steps % 3], **case.stale)
            elif not (case.norm and limit_norm(net, case, contexts)):
                if case.norm:  # a call that is refused loses nothing
                    with suppress(ValueError):
                        trainer.step(X + 1)
                    with suppress(ValueError):
                        trainer.step(len(parts[-1][0]), weight=1.0)
                trainer.step(len(parts[-1][0]), **weight, **case.stale)
            if case.parts > 1:
                net.collect_params().zero_grad()
            steps += 1
    assert len(sampler) * EPOCHS == case.parts * steps
    return values(net), len(sizes)


def alone(case):
    """Trains one process on the same samples by gluon's own trainer."""
    one = type(case)(
        sparse=case.sparse, weighted=case.weighted, few=case.few, norm=case.norm, skips=case.skips
    )
    net = one.network(1, [mx.cpu()])
    start = weights(net)
    trainer = gluon.Trainer(net.collect_params(), "sgd", dict(SGD), kvstore=None)
    for epoch in range(EPOCHS):
        order = np.random.default_rng((0, epoch)).permutation(SAMPLES)
        for begin in range(0, SAMPLES, X):
            index = order[begin : begin + X]
            batch = [nd.array(each[index]) for each in (IDS, LABELS, one.mask)]
            one.backward(net, batch, [mx.cpu()])
            if case.norm and case.mean:
                one.norm = case.norm * len(index)
            if case.norm and limit_norm(net, one, [mx.cpu()]):
                continue
            count = one.mask[index].sum() if case.weighted else len(index)
            for gradient in gradients(net, mx.cpu()):
                gradient /= count
            if case.clip:
                clip(net, [mx.cpu()], case.clip)
            trainer.update(1, **one.stale)
    return start, weights(net)


# --- misuse ---------------------------------------------------------------------------------------


def train(case=None, per_step=1, weight=None, size=None, norms=False, norm=None, second=False,
          by_hand=False, **options):  # fmt: skip
    """Steps after `per_step` loader batches."""
    case = case or Case()
    net = case.network(1, [mx.cpu()])
    trainer = make(net, policy=Even(), global_batch_size=X // 2, kvstore="dist", **options)
    sampler = trainer.batch_sampler(SAMPLES, seed=0)
    batches = iter(gluon.data.DataLoader(case.data, batch_sampler=sampler, **case.loader))
    for _ in range(3):
        parts = list(islice(batches, per_step))
        for part in parts:
            case.backward(net, part, [mx.cpu()])
        if by_hand:
            for gradient in gradients(net, mx.cpu()):
                gradient[:] = gradient.clip(-0.1, 0.1)
        if norms or second:
            trainer.allreduce_grads()
        if second:
            trainer.allreduce_grads()
        if norm:
            clip_global_norm(gradients(net, mx.cpu()), norm)
        if size is None:
            trainer.step(len(parts[-1][0]), **({} if weight is None else {"weight": weight}))
        else:
            trainer.allreduce_grads()
            trainer.update(size)
        net.collect_params().zero_grad()


class Adding(Case):
    """Gradients that accumulate, for a trainer that is not told."""

    def __init__(self, **options):
        super().__init__(parts=2, **options)


MISUSES = {
    "update_size": lambda: train(size=7),
    "too_many_batches": lambda: train(Adding(), per_step=3),
    "too_many_batches_ahead": lambda: train(Adding(loader={"num_workers": 1,
                                                           "thread_pool": True}), per_step=2),
    "too_many_parts": lambda: train(Adding(), per_step=4, accumulate=2),
    "too_few_parts": lambda: train(Adding(), accumulate=2),
    "no_adding": lambda: train(per_step=2, accumulate=2),
    "accumulated_means": lambda: train(Adding(), accumulate=2, mean_loss=True),
    "no_parts": lambda: train(accumulate=0),
    "more_parts_than_samples": lambda: train(Adding(), accumulate=17),
    "different_parts": lambda: train(Adding(), accumulate=2 + rank),
    "sparse_on_one": lambda: make(Case(sparse=rank > 0).network(1, [mx.cpu()])),
    "no_weight": lambda: train(weight=0.0),
    "step_of_means": lambda: train(norms=True),
    "negative_weight": lambda: train(weight=-1.0),
    "norm_of_weighted": lambda: train(weight=1.0, norm=1.0),
    "second_sum": lambda: train(second=True),
    "weight_on_one": lambda: train(weight=1.0 if rank == 1 else None),
}  # fmt: skip


store = mx.kv.create("dist")  # MXNet's own, as scripts create it
rank = store.rank
warnings = Warnings()
for name, case in CASES.items():
    warnings.texts.clear()
    ours, sizes = together(case)
    said = list(warnings.texts)
    found = {"said": said, "sizes": sizes}
    if rank == 0:
        start, reference = alone(case)
        found |= {"difference": largest(ours, reference), "moved": largest(start, reference)}
    result(name, found)

warnings.texts.clear()
masked = Case(weighted=True)
train(masked)
result("warned", list(warnings.texts))
train(masked)
result("warned_twice", list(warnings.texts))

warnings.texts.clear()
train(by_hand=True)
result("by_hand", list(warnings.texts))

answer_all(MISUSES, MISUSES)
