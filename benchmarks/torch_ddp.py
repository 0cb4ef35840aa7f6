"""Compares balanced steps of PyTorch's DistributedDataParallel with plain ones, in the same run.

Three worker processes with CPU quotas in the proportion 0.7 : 0.7 : 0.3 train two copies of a
network of a few CPU milliseconds per sample with X = 192: a plain one on even batches, and one that
examples/pytorch_ddp.py balances. They take turns, in blocks of steps. Prints the ratio of their
steps, and how close the balanced ones are to the ideal step of the same run, see
`unequal_workers.py`.

With a GPU, or with ``--gpu``, there are two workers, which share the GPU if there is only one, and
X = 256. Worker 1 rests twice as long as its step takes, as a slower GPU would take longer::

    PYTHONPATH=. python benchmarks/torch_ddp.py
    PYTHONPATH=. python benchmarks/torch_ddp.py --gpu --image 12 --width 16 --layers 2 --blocks 4
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

from side_by_side import RESULT, report

ROOT = Path(__file__).parents[1]
SPEEDS = (0.7, 0.7, 0.3)
SAMPLES = 1024  # that are different
SETTLING = 2  # blocks that do not count, in which plans follow the speeds


class Scale(NamedTuple):
    """Sizes of a kind of job."""

    global_batch_size: int
    image: int  # height and width
    width: int  # channels
    layers: int


CPU, GPU = Scale(192, 16, 32, 4), Scale(256, 56, 64, 20)


def network(torch, given):
    """Returns convolutions at the full size of the images."""
    nn, width = torch.nn, given.width
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(given.layers):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, 10))


class Images:
    """Data set of `number` samples, some of them several times, which are read batch by batch."""

    def __init__(self, torch, number, image, device):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES, 3, image, image, generator=generator)
        self.x, self.y = x.to(device), torch.arange(SAMPLES, device=device) % 10
        self.number, self.tensor = number, torch.tensor

    def __len__(self):
        return self.number

    def __getitems__(self, indices):
        rows = self.tensor(indices, device=self.x.device) % SAMPLES
        return self.x[rows], self.y[rows]


def train(given):
    """Trains as one of the workers; worker 0 tells the seconds of each step, by block."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    sys.path.append(str(ROOT / "examples"))
    from pytorch_ddp import LoadBalancer

    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    distributed.init_process_group("nccl" if gpus >= workers else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus) if gpus else "cpu"
    if gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    wait = torch.cuda.synchronize if gpus else lambda: None

    def make():
        torch.manual_seed(0)
        model = DistributedDataParallel(network(torch, given).to(device))
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def run(model, optimizer, batches):
        seconds, ended = [], time.perf_counter()
        for x, y in islice(batches, given.steps):
            begun = time.perf_counter()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            if given.gpu and rank == 1:  # the backward pass takes twice as long as the forward pass
                wait()
                time.sleep(2 * 3 * (time.perf_counter() - begun))
            loss.backward()
            optimizer.step()
            wait()
            before, ended = ended, time.perf_counter()
            seconds.append(ended - before)
        return median(seconds[1:])  # the first one also has what the other side has left

    total = given.global_batch_size
    data = Images(torch, given.blocks * given.steps * total, given.image, device)
    options = {"collate_fn": lambda batch: batch}
    (plain, plain_optimizer), (model, optimizer) = make(), make()
    balancer = LoadBalancer(model, total, policy=given.policy)
    loader = balancer.loader(data, **options)
    batches = iter(DataLoader(data, total // workers, sampler=DistributedSampler(data), **options))
    found = {"plain": [], "balanced": [], "plans": []}
    for _ in balancer.epochs(1):
        own = iter(loader)
        for _ in range(given.blocks):
            found["plain"].append(run(plain, plain_optimizer, batches))
            balancer.session.exclude_step()
            found["balanced"].append(run(model, optimizer, own))
            found["plans"].append(balancer.session.sizes)
        next(own, None)  # ends the last step
    if rank == 0:
        print(RESULT + json.dumps(found), flush=True)
    distributed.destroy_process_group()


def read_arguments(has_gpu):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", action="store_true", help="two workers, of which one rests")
    parser.add_argument("--blocks", type=int, default=8, help="of each side")
    parser.add_argument("--steps", type=int, default=20, help="of a block")
    parser.add_argument("--policy", help="as in LBBSP_POLICY; default: LB-BSP")
    for name in Scale._fields:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    given.gpu = given.gpu or has_gpu
    for name, default in (GPU if given.gpu else CPU)._asdict().items():
        if getattr(given, name) is None:
            setattr(given, name, default)
    return given


def main():
    """Launches the workers and prints the figures."""
    from lbbsp_core import Run, read_run
    from lbbsp_core.launch import launch
    from lbbsp_core.report.summary import summarise
    from lbbsp_core.resources.gpu import count_gpus

    given = read_arguments(count_gpus() > 0)
    if given.worker:
        train(given)
        return
    found = {}

    def take(rank, line):
        if line.startswith(RESULT):
            found.update(json.loads(line.removeprefix(RESULT)))
        elif given.verbose:
            print(f"[{rank}] {line}", flush=True)

    sizes = [f"--{name.replace('_', '-')}={getattr(given, name)}" for name in Scale._fields]
    more = [f"--blocks={given.blocks}", f"--steps={given.steps}", *["--gpu"] * given.gpu]
    policy = [f"--policy={given.policy}"] if given.policy else []
    with tempfile.TemporaryDirectory() as folder:
        status = launch(
            [__file__, "--worker", *sizes, *more, *policy],
            workers=2 if given.gpu else 3,
            framework="torch",
            speeds=None if given.gpu else SPEEDS,
            run_dir=Path(folder),
            timeout=900,
            output=take,
        )
        if status:
            sys.exit(f"the workers failed with status {status}: --verbose shows their output")
        run = read_run(folder)
    print(f"{given.global_batch_size} samples a step; plans after each block:")
    print("  " + " ".join("/".join(map(str, plan)) for plan in found["plans"]))
    report("plain DDP", found["plain"][SETTLING:], found["balanced"][SETTLING:])
    settled = summarise(Run(run.header, run.steps[SETTLING * given.steps :]))
    even = median(found["plain"][SETTLING:])
    answers = {
        "busy time of each worker": [f"{1e3 * each:.1f} ms" for each in settled.busy_seconds],
        "communication (last arrival to release)": f"{1e3 * settled.communication_seconds:.1f} ms",
        "ideal_busy_share": f"{settled.ideal_busy_share:.3f}",
        "  of plain DDP, by the same costs": f"{settled.ideal_busy_seconds / even:.3f}",
        "efficiency": f"{settled.efficiency:.3f}",
    }
    for question, answer in answers.items():
        print(f"{question:<48} {answer}")


if __name__ == "__main__":
    main()
