"""Checks of PyTorch and of NVML for `tools/gpu_checks.py`.

- ``resources``: utilisation and memory of the GPU, as `ResourceSampler` reads them from NVML.
- ``torch-first-uses``: how much longer the first step with a batch size takes than the next five,
  with and without cuDNN's autotuning.
- ``torch-profile-transformer``, ``torch-profile-convnet``: what ``lbbsp profile`` finds for a step.

``benchmarks/torch_ddp.py`` measures two workers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from gpu_table import Check, Given, print_profile, print_row

from lbbsp_core import ResourceSampler
from lbbsp_core.profiler import BatchSweep, profile_step
from lbbsp_core.profiler._step import timed
from lbbsp_core.resources.gpu import driver_version, gpu_name
from lbbsp_core.resources.sampler import DEFAULT_GPU_NAMES

LONGEST_STEP = 60.0  # seconds; the first step imports PyTorch


class Scale(NamedTuple):
    """Sizes of the checks; batches are in samples."""

    image: int  # height and width
    width: int  # channels of the first convolution; a token has eight times as many features
    tokens: int  # of a sequence
    max_batch: int  # of a profile
    even: int  # batch before the first uses of others, as the even share in a job
    new: tuple[int, ...]  # these others


FULL = Scale(224, 64, 128, 65536, 64, (*range(16, 64, 4), *range(68, 116, 4)))
QUICK = Scale(64, 16, 32, 16, 8, (5, 6, 7, 9, 10, 11, 12, 13))
SETTLING, SAMPLED = 1.5, 1.5  # seconds; the driver averages utilisation over up to one


def scale_of(given: Given) -> Scale:
    """Returns the sizes of the checks."""
    return QUICK if given.quick else FULL


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


def profiled_convnet(batch: int) -> None:
    """Trains a step of the convolutional net, in the process of lbbsp's profiler."""
    _profiled("convnet", batch)


def profiled_transformer(batch: int) -> None:
    """Trains a step of the transformer, in the process of lbbsp's profiler."""
    _profiled("transformer", batch)


def _profiled(net: str, batch: int) -> None:
    make_step(net, QUICK if "--quick" in sys.argv else FULL)(batch)


def has_cuda() -> bool:
    """Returns whether PyTorch is imported and finds a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()


def origin() -> str:
    """Returns the versions on which measurements depend."""
    return f"driver {driver_version() or 'none'}, PyTorch {version('torch')}"


def check_resources(given: Given) -> None:
    """Samples the GPU while it is idle and, with PyTorch, while it computes."""
    try:
        print_row("resources", "GPU", f"{gpu_name()}, driver {driver_version()}")
    except Exception as error:  # a missing package, library or driver: different exceptions
        remedy = "pip install nvidia-ml-py, and check that nvidia-smi finds the GPU"
        print_row("resources", "not available", f"{error}: {remedy}")
        return
    scale = scale_of(given)
    loads: dict[str, Callable[[], object]] = {"idle": lambda: time.sleep(0.05)}
    if importlib.util.find_spec("torch"):
        loads["computing"] = lambda: timed(make_step("convnet", scale), scale.even)
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


def check_first_uses(given: Given) -> None:
    """Measures first steps with batch sizes: half of them with autotuning, half without."""
    torch: Any = importlib.import_module("torch")
    scale = scale_of(given)
    found: dict[str, list[tuple[int, float, float]]] = {}
    sizes = random.Random(0).sample(scale.new, len(scale.new))
    for net in NETS:
        step = make_step(net, scale)
        for number, size in enumerate([scale.even, *sizes]):
            torch.backends.cudnn.benchmark = number % 2 == 0
            first, *others = (timed(step, size) for _ in range(6))
            if number:  # the very first step builds the net
                name = f"{net}, autotuning {'off' if number % 2 else 'on'}"
                found.setdefault(name, []).append((size, first, median(others)))
    for name, uses in found.items():
        extra = [1e3 * (first - usual) for _, first, usual in uses]
        print_row(
            "torch-first-uses", f"{name}: extra time, median of {len(uses)}", median(extra), "ms"
        )
        print_row("torch-first-uses", f"{name}: extra time, largest", max(extra), "ms")
        print_row(
            "torch-first-uses", f"{name}: step, median", 1e3 * median(u[2] for u in uses), "ms"
        )
    document = {"origin": origin(), "columns": ["batch", "first seconds", "usual seconds"], **found}
    (given.out / "first_uses.json").write_text(json.dumps(document, indent=1) + "\n")


def check_profile(net: str, given: Given) -> None:
    """Profiles the step of a net, up to the limit of the memory."""

    def progress(activity: str, batch: int, seconds: float | None) -> None:
        took = "out of memory" if seconds is None else f"{1e3 * seconds:.4g} ms"
        print(f"{net}: {activity} {batch} samples: {took}", flush=True)

    step = {"convnet": profiled_convnet, "transformer": profiled_transformer}[net]
    found = profile_step(
        f"{__file__}:{step.__name__}",
        sweep=BatchSweep(max_batch=scale_of(given).max_batch, rounds=1),
        timeout=LONGEST_STEP,
        arguments=["--quick"] * given.quick,
        progress=progress,
    )
    device = f"{found.device}, {origin()}, autotuning on; {net} of tools/gpu_torch.py"
    replace(found, device=device).save(given.out / f"profile_{net}.json")
    batches = {1, 4, 16, 64, 256, 1024, found.points[-1].batch}
    print_profile(f"torch-profile-{net}", found, batches)


CHECKS = {
    "resources": Check(check_resources, "pynvml"),
    "torch-first-uses": Check(check_first_uses, "torch"),
    **{
        f"torch-profile-{net}": Check(functools.partial(check_profile, net), "torch")
        for net in NETS
    },
}
"""By name; the longest are the last, so that a lack of time costs the others nothing."""
