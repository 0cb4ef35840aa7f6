"""Says what each misuse of examples/pytorch_ddp.py is answered with, in a process of its own."""

import sys
import tempfile
from itertools import count
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from pytorch_ddp import LoadBalancer

DATA = TensorDataset(torch.zeros(40, 3), torch.zeros(40, 1))
X = 8


class Training:
    """A model, its balancer, and its data."""

    def __init__(self, net=None, **options):
        self.model = DistributedDataParallel(net or nn.Linear(3, 1))
        self.balancer = LoadBalancer(self.model, X, **options)
        self.loader = self.balancer.loader(DATA)

    def loss(self, x):
        return self.model(x).mean()

    def run(self, step, epochs=2):
        for _ in self.balancer.epochs(epochs):
            for number, (x, _) in enumerate(self.loader):
                step(number, x)


def without_ddp():
    LoadBalancer(nn.Linear(3, 1), X)


def synchronized():
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    model.module[1].__class__ = nn.SyncBatchNorm  # PyTorch itself needs a GPU for it
    LoadBalancer(model, X)


def twice():
    training = Training()

    def step(number, x):
        for _ in range(1 + (number == 2)):
            training.loss(x).backward()

    training.run(step)


def skipped():
    training = Training()
    training.run(lambda number, x: number == 2 or training.loss(x).backward())


def accumulated():
    training = Training()

    def step(_, x):
        with training.model.no_sync():
            training.loss(x).backward()

    training.run(step)


def own_batch():
    training = Training()
    for _ in training.balancer.epochs(2):
        training.loss(torch.zeros(8, 3)).backward()


def outside():
    next(iter(Training().loader))


def trained_twice():
    training = Training()
    for _ in range(2):
        training.run(lambda _, x: training.loss(x).backward(), epochs=1)


def without_loader():
    balancer = LoadBalancer(DistributedDataParallel(nn.Linear(3, 1)), X)
    next(balancer.epochs(1))


def batch_size():
    Training().balancer.loader(DATA, batch_size=4)


def option():
    Training(polcy="lbbsp")


def every():
    Training(every=4)


def other_data():
    with tempfile.TemporaryDirectory() as folder:
        for samples in (40, 39):
            training = Training(checkpoint=folder)
            training.loader = training.balancer.loader(TensorDataset(*DATA[:samples]))
            training.run(lambda _, x: training.loss(x).backward())  # noqa: B023


def fine():
    """Stops when asked, and after `break` goes on with the next epoch."""
    training, steps = Training(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))), []
    session = training.balancer.session
    for epoch in training.balancer.epochs(5):
        for number, (x, _) in zip(count(), training.loader, strict=False):
            training.loss(x).backward()
            steps.append((epoch, number, session.step))
            if (epoch, number) == (0, 1):
                break
            if (epoch, number) == (1, 2):
                session.request_stop()
    raise ValueError(f"steps {steps}")


CASES = [
    without_ddp, synchronized, twice, skipped, accumulated, own_batch, outside, trained_twice,
    without_loader, batch_size, option, every, other_data, fine,
]  # fmt: skip


def answer(case):
    try:
        case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    for case in CASES:
        print(f"{case.__name__}: {answer(case)}", flush=True)


if __name__ == "__main__":
    main()
