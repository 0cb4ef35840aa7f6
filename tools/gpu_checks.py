"""Measures on a machine with an NVIDIA GPU what the tests cannot, and prints one table.

    PYTHONPATH=. python tools/gpu_checks.py --out FOLDER
    PYTHONPATH=. python tools/gpu_checks.py --quick     # a try in half a minute, also on a CPU

It needs PyTorch, nvidia-ml-py and the dependencies of lbbsp. Each check has processes of its own:

- ``resources``: utilisation and memory of the GPU, as `ResourceSampler` reads them from NVML.
- ``first-uses``: how much longer the first step with a batch size takes than the next five, with
  and without cuDNN's autotuning.
- ``workers``: two workers of a toy plugin, with even shares and then balanced. Worker 1 rests twice
  as long as each of its steps took, as a slower GPU would take longer. They take time from each
  other, since a GPU runs the kernels of one process at a time.
- ``profile-transformer``, ``profile-convnet``: what ``lbbsp profile`` finds for a training step.

The folder gets the profiles, the seconds of the first uses and the run records.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from lbbsp_core import Even, ResourceSampler, SessionOptions, WorkerSession, read_run
from lbbsp_core.launch import launch
from lbbsp_core.profiler import BatchSweep, profile_step
from lbbsp_core.profiler._step import timed
from lbbsp_core.report.summary import summarise
from lbbsp_core.resources.gpu import driver_version, gpu_name
from lbbsp_core.resources.sampler import DEFAULT_GPU_NAMES
from lbbsp_core.runtime.exchange.handshake import Devices, gpu

LONGEST_CHECK, LONGEST_STEP = 180.0, 60.0  # seconds; the first step imports PyTorch
SETTLING, SAMPLED = 1.5, 1.5  # seconds; the driver averages utilisation over up to one


class Scale(NamedTuple):
    """Sizes of the checks; batches are in samples."""

    image: int  # height and width
    width: int  # channels of the first convolution; a token has eight times as many features
    tokens: int  # of a sequence
    max_batch: int  # of a profile
    even: int  # batch before the first uses of others, as the even share in a job
    new: tuple[int, ...]  # these others
    global_batch_size: int  # of the two workers
    steps: tuple[int, int]  # with even shares, and balanced


FULL = Scale(224, 64, 128, 65536, 64, (*range(16, 64, 4), *range(68, 116, 4)), 256, (40, 400))
QUICK = Scale(64, 16, 32, 16, 8, (5, 6, 7, 9, 10, 11, 12, 13), 16, (10, 20))
POLICIES = {"even": Even(), "balanced": None}


def print_row(check: str, figure: str, value: object, unit: str = "") -> None:
    """Prints a line of the table."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
    print(f"| {check} | {figure} | {text} | {unit} |", flush=True)


def convnet(torch: Any, device: str, scale: Scale) -> tuple[Any, Callable[[int], Any]]:
    """Returns a residual net of 21 convolutions, and a function that draws images."""
    nn: Any = torch.nn

    class Residual(nn.Sequential):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x + super().forward(x)

    def convolution(inputs: int, outputs: int, stride: int = 1) -> Any:
        weights = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        return nn.Sequential(weights, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    # A few channels first: cuDNN's tensors should have fewer than 2^31 elements at the limit, too.
    few, channels = scale.width // 4, scale.width
    layers = [convolution(3, few, 2), convolution(few, channels, 2)]
    for channels in (scale.width * 2**stage for stage in range(4)):
        if channels > scale.width:
            layers.append(convolution(channels // 2, channels, 2))
        blocks = [convolution(channels, channels) for _ in range(4)]
        layers += [Residual(*blocks[:2]), Residual(*blocks[2:])]
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)
    shape = 3, scale.image, scale.image
    return nn.Sequential(*layers, *last), lambda n: torch.randn(n, *shape, device=device)


def transformer(torch: Any, device: str, scale: Scale) -> tuple[Any, Callable[[int], Any]]:
    """Returns an encoder of eight layers, and a function that draws sequences of tokens."""
    nn, features, words = torch.nn, 8 * scale.width, 1000
    layer = nn.TransformerEncoderLayer(features, 4, 4 * features, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    last = nn.Flatten(), nn.Linear(features * scale.tokens, 10)
    model = nn.Sequential(nn.Embedding(words, features), encoder, *last)
    return model, lambda n: torch.randint(words, (n, scale.tokens), device=device)


NETS = {"transformer": transformer, "convnet": convnet}


@functools.cache
def make_step(net: str, scale: Scale) -> Callable[[int], None]:
    """Returns a function that runs one training step with a batch of a given size."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")  # TensorFloat-32, as convolutions by default
    device = "cuda" if has_cuda() else "cpu"
    if not has_cuda():
        torch.set_num_threads(1)  # two workers share the cores
    model, draw = NETS[net](torch, device, scale)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: int) -> None:
        x, labels = draw(batch), torch.randint(10, (batch,), device=device)
        optimizer.zero_grad(set_to_none=True)
        try:
            torch.nn.functional.cross_entropy(model(x), labels).backward()
        except RuntimeError as error:
            if "unable to find an engine" in str(error):  # cuDNN: no algorithm's workspace fits
                raise MemoryError(str(error)) from error
            raise
        optimizer.step()

    return step


def profiled_step(batch: int) -> None:
    """Runs the step that ``--run profile-NET`` asks for, in the process of lbbsp's profiler."""
    given = read_arguments()
    make_step(given.run.removeprefix("profile-"), given.scale)(batch)


def has_cuda() -> bool:
    """Returns whether PyTorch is imported and finds a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()


def origin() -> str:
    """Returns the versions on which measurements depend."""
    return f"driver {driver_version() or 'none'}, PyTorch {version('torch')}"


def check_resources(given: argparse.Namespace) -> None:
    """Samples the GPU while it is idle and, with PyTorch, while it computes."""
    try:
        print_row("resources", "GPU", f"{gpu_name()}, driver {driver_version()}")
    except Exception as error:  # a missing package, library or driver: different exceptions
        remedy = "pip install nvidia-ml-py, and check that nvidia-smi finds the GPU"
        print_row("resources", "not available", f"{error}: {remedy}")
        return
    loads: dict[str, Callable[[], object]] = {"idle": lambda: time.sleep(0.05)}
    if importlib.util.find_spec("torch"):
        loads["computing"] = lambda: timed(make_step("convnet", given.scale), given.scale.even)
    with ResourceSampler(DEFAULT_GPU_NAMES) as sampler:
        for load, act in loads.items():
            act()
            samples: list[tuple[float, ...]] = []
            start = time.monotonic()
            while (seconds := time.monotonic() - start) < SETTLING + SAMPLED or not samples:
                act()
                if seconds > SETTLING:
                    samples.append(sampler.sample())
            for name, value in zip(sampler.names, np.median(samples, axis=0), strict=True):
                print_row("resources", f"{name}, {load}", float(value), "%")
    if has_cuda():
        free, total = sys.modules["torch"].cuda.mem_get_info()
        print_row("resources", "memory in use, by CUDA", 100.0 * (1 - free / total), "%")


def check_first_uses(given: argparse.Namespace) -> None:
    """Measures first steps with batch sizes: half of them with autotuning, half without."""
    torch: Any = importlib.import_module("torch")
    found: dict[str, list[tuple[int, float, float]]] = {}
    sizes = random.Random(0).sample(given.scale.new, len(given.scale.new))
    for net in NETS:
        step = make_step(net, given.scale)
        for number, size in enumerate([given.scale.even, *sizes]):
            torch.backends.cudnn.benchmark = number % 2 == 0
            first, *others = (timed(step, size) for _ in range(6))
            if number:  # the very first step builds the net
                name = f"{net}, autotuning {'off' if number % 2 else 'on'}"
                found.setdefault(name, []).append((size, first, median(others)))
    for name, uses in found.items():
        extra = [1e3 * (first - usual) for _, first, usual in uses]
        print_row("first-uses", f"{name}: extra time, median of {len(uses)}", median(extra), "ms")
        print_row("first-uses", f"{name}: extra time, largest", max(extra), "ms")
        print_row("first-uses", f"{name}: step, median", 1e3 * median(u[2] for u in uses), "ms")
    document = {"origin": origin(), "columns": ["batch", "first seconds", "usual seconds"], **found}
    (given.out / "first_uses.json").write_text(json.dumps(document, indent=1) + "\n")


class Pair(NamedTuple):
    """Collectives of two processes, connected by a pipe."""

    rank: int
    connection: Connection
    workers: int = 2

    def all_gather(self, mine: Any) -> list[Any]:
        """Returns what both workers give, by rank."""
        self.connection.send(mine)
        if not self.connection.poll(LONGEST_STEP):
            raise TimeoutError(f"worker {1 - self.rank} has sent nothing for {LONGEST_STEP:g} s")
        other = self.connection.recv()
        return [mine, other] if self.rank == 0 else [other, mine]


def train(pair: Pair, given: argparse.Namespace) -> None:
    """Trains as one of two workers, of which worker 1 takes three times as long for a sample."""
    step, total = make_step("convnet", given.scale), given.scale.global_batch_size
    devices = Devices((gpu(0),), are_gpus=True, show_memory=True) if has_cuda() else Devices()
    for (name, policy), steps in zip(POLICIES.items(), given.scale.steps, strict=True):
        options = SessionOptions(policy=policy, record=given.out / f"workers_{name}.jsonl")
        session = WorkerSession(pair, total, options, framework="toy", devices=devices)
        session.use_order(session.make_order(steps * total))
        session.start({"steps": steps})
        for number in range(steps):
            session.begin_step()
            seconds = timed(step, len(session.local_indices(number)))  # waits for the GPU
            time.sleep(2 * pair.rank * seconds)
            session.after_allreduce(pair.all_gather(session.before_allreduce()))
        session.close()


def check_workers(given: argparse.Namespace) -> None:
    """Compares even shares with balanced ones on two workers that share a GPU."""
    records = {name: given.out / f"workers_{name}.jsonl" for name in POLICIES}
    for record in records.values():
        record.unlink(missing_ok=True)  # a run would continue it
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(2, context) as pool:
        pairs = [Pair(rank, end) for rank, end in enumerate(context.Pipe())]
        list(pool.map(train, pairs, [given] * 2))
    for name, record in records.items():
        run = read_run(record)
        summary = summarise(run)
        print_row("workers", f"{name}: last plan", run.steps[-1].sizes, "samples")
        print_row("workers", f"{name}: step", 1e3 * summary.step_seconds, "ms")
        for rank, seconds in enumerate(summary.busy_seconds):
            print_row("workers", f"{name}: busy time of worker {rank}", 1e3 * seconds, "ms")
        print_row("workers", f"{name}: efficiency", summary.efficiency)


def check_profile(net: str, given: argparse.Namespace) -> None:
    """Profiles the step of a net, up to the limit of the memory."""

    def progress(activity: str, batch: int, seconds: float | None) -> None:
        took = "out of memory" if seconds is None else f"{1e3 * seconds:.4g} ms"
        print(f"{net}: {activity} {batch} samples: {took}", flush=True)

    found = profile_step(
        f"{__file__}:{profiled_step.__name__}",
        sweep=BatchSweep(max_batch=given.scale.max_batch, rounds=1),
        timeout=LONGEST_STEP,
        arguments=sys.argv[1:],
        progress=progress,
    )
    check, sizes, last = f"profile-{net}", given.scale, found.points[-1].batch
    inputs = {"convnet": f"images {sizes.image} x {sizes.image}", "transformer": "token sequences"}
    device = (
        f"{found.device}, {origin()}, autotuning on; {net} of tools/gpu_checks.py on {inputs[net]}"
    )
    replace(found, device=device).save(given.out / f"profile_{net}.json")
    print_row(check, "device", found.device)
    for point in found.points:
        if point.batch in (1, 4, 16, 64, 256, 1024, last):
            print_row(check, f"step with {point.batch}", 1e3 * point.seconds, "ms")
    for name, fit in found.fits.items():
        error = "unknown" if fit.cv_error is None else 100 * fit.cv_error
        print_row(check, f"error of {fit}{', best' * (name == found.best)}", error, "%")
    limit = found.out_of_memory_at
    print_row(
        check, "largest that fits" if limit else "largest tried", (limit or last + 1) - 1, "samples"
    )
    for note in found.notes:
        print_row(check, "note", note)


CHECKS: dict[str, Callable[[argparse.Namespace], None]] = {
    "resources": check_resources,
    "first-uses": check_first_uses,
    "workers": check_workers,
    **{f"profile-{net}": functools.partial(check_profile, net) for net in NETS},
}
"""The longest ones are the last, so that a lack of time costs the others nothing."""


def read_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small nets, at most 16 samples")
    parser.add_argument("--image", type=int, choices=range(64, 512, 32), metavar="PIXELS")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=[*CHECKS])
    parser.add_argument("--minutes", type=float, default=6.0, help="limit of the whole run")
    parser.add_argument("--out", type=Path, help="folder of the JSON files; by default none stay")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # the check of this process
    given = parser.parse_args()
    given.scale = QUICK if given.quick else FULL
    given.scale = given.scale._replace(image=given.image or given.scale.image)
    return given


def run_check(name: str, out: Path, timeout: float) -> str:
    """Runs a check in a process of its own; returns why it failed, or an empty text."""

    def show(_rank: int, line: str) -> None:
        print(line, file=sys.stdout if line.startswith("| ") else sys.stderr, flush=True)

    if name != "resources" and not importlib.util.find_spec("torch"):
        return "PyTorch is missing: pip install torch"
    if timeout <= 0:
        return "the time is up: raise --minutes, or give --only"
    command = [__file__, *sys.argv[1:], "--out", str(out), "--run", name]
    status = launch(command, workers=1, devices="all", timeout=timeout, output=show)
    if status in (130, 143):
        sys.exit(status)
    return f"status {status}, see standard error" if status else ""


def main() -> None:
    """Runs the checks and prints the table, or runs the one check of this process."""
    given, failures = read_arguments(), 0
    if given.run:
        CHECKS[given.run](given)
        return
    deadline = time.monotonic() + 60 * given.minutes
    print("| check | figure | value | unit |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        for name in given.only:
            if why := run_check(name, out, min(LONGEST_CHECK, deadline - time.monotonic())):
                print_row(name, "FAILED", why)
                failures += 1
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
