"""Trains cases on uneven, changing batches, and then by plain PyTorch on the whole batches.

Worker 0 prints how far the weights are apart, how far they have moved, and how many plans there
were. A case trains in float64: what is then left of a difference is not rounding. With ``--restart
FOLDER`` a case has checkpoints, and its first attempt ends before step 8, by the signal ``--by``
to worker 1 itself.
"""

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[3] / "examples"))
from pytorch_ddp import LoadBalancer

from lbbsp_core.testing import ChangingPlans

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cudnn.allow_tf32 = False

X, EPOCHS = 64, 2
SAMPLES = 5 * X + 21  # a short last batch in every epoch
PLANS = {
    1: ((64,),),
    2: ((48, 16), (40, 24), (7, 57)),
    3: ((40, 16, 8), (30, 31, 3), (1, 20, 43)),
}
RANDOM = np.random.default_rng(0)
IMAGES = torch.from_numpy(RANDOM.normal(size=(SAMPLES, 1, 8, 8)).astype(np.float32))
LABELS = torch.from_numpy(RANDOM.integers(0, 10, SAMPLES))


def network():
    torch.manual_seed(1)
    convolution = nn.Conv2d(1, 16, 3)
    return nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(16 * 36, 10)).to(DEVICE)


@dataclass(frozen=True)
class Case:
    optimizer: object
    clip: float = 0.0
    double: bool = False
    penalty: float = 0.0  # a regulariser in the loss
    rest: float = 0.0  # seconds per sample for which worker 0 rests in each step
    policy: object = None  # a cycle of plans
    ddp: dict = field(default_factory=dict)
    loader: dict = field(default_factory=dict)

    def step(self, model, optimizer, x, y):
        x, y = x.to(DEVICE), y.to(DEVICE)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.double() if self.double else x), y)
        if self.penalty:
            loss = loss + self.penalty * sum((each**2).sum() for each in model.parameters())
        loss.backward()
        if self.clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            assert norm > self.clip, "nothing was clipped"
        optimizer.step()


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
BUCKETS = {"bucket_cap_mb": 0.001}
CASES = {
    "sgd_clipping": Case(SGD, clip=0.5),
    "buckets_prefetching": Case(SGD, ddp=BUCKETS, loader={"num_workers": 1}),
    "penalty_bucket_views": Case(SGD, penalty=0.01, ddp={"gradient_as_bucket_view": True}),
    "adamw_double": Case(partial(torch.optim.AdamW, lr=1e-2), double=True, ddp=BUCKETS),
    "load_balanced": Case(SGD, clip=0.5, rest=0.002, policy="lbbsp"),
}


def balanced(case, given):
    """Trains through the plugin."""
    net = network().double() if case.double else network()
    model = DistributedDataParallel(net, **case.ddp)
    workers, rank = distributed.get_world_size(), distributed.get_rank()
    policy = case.policy or ChangingPlans(PLANS[workers])
    optimizer, plans = case.optimizer(model.parameters()), set()
    saves = {"checkpoint": given.restart, "every": 3, "keep": [optimizer]} if given.restart else {}
    balancer = LoadBalancer(model, X, policy=policy, **saves)
    loader = balancer.loader(TensorDataset(IMAGES, LABELS), **case.loader)
    for _ in balancer.epochs(EPOCHS):
        for x, y in loader:
            plans.add(balancer.session.sizes)
            if given.restart:  # no step overtakes a checkpoint that is being written
                balancer._schedule.flush()
            if given.restart and os.environ["LBBSP_RESTART"] == "0" and balancer.session.step == 8:
                os.kill(os.getpid(), signal.Signals[given.by] if rank == 1 else 0)
            time.sleep(case.rest * len(x) * (rank == 0))
            case.step(model, optimizer, x, y)
    return model.module, plans


def alone(case):
    """The reference: plain PyTorch, on whole batches of the documented order."""
    model = network().double() if case.double else network()
    optimizer = case.optimizer(model.parameters())
    for epoch in range(EPOCHS):
        order = torch.from_numpy(np.random.default_rng((0, epoch)).permutation(SAMPLES))
        for batch in order.split(X):
            case.step(model, optimizer, IMAGES[batch], LABELS[batch])
    return model


def difference(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[*CASES])
    parser.add_argument("--restart")
    parser.add_argument("--by", default="SIGKILL")
    given = parser.parse_args()
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in given.names:
        model, plans = balanced(CASES[name], given)
        if distributed.get_rank() == 0:
            other = alone(CASES[name])
            found = {
                "difference": difference(model, other),
                "moved": difference(network(), other.float()),
                "plans": len(plans),
            }
            print(f"RESULT {name} {json.dumps(found)}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
