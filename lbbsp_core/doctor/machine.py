"""What this machine offers: cores, memory, GPUs, cgroups, driving factors, the allocator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from lbbsp_core.doctor.finding import Finding, note, ok, problem
from lbbsp_core.launch.cluster import GPU_DEVICES, KEEP_FREED_MEMORY, allocator_defaults
from lbbsp_core.launch.cpu_shares import PERIOD_US
from lbbsp_core.launch.throttle import CYCLE_SECONDS, Throttle, available_cores, open_quotas
from lbbsp_core.resources import ResourceSampler
from lbbsp_core.resources.cgroup import cpu_quotas, memory_limit
from lbbsp_core.resources.gpu import hides_gpus, import_nvml, opened_nvml, text_of
from lbbsp_core.resources.host import Host
from lbbsp_core.resources.sampler import DEFAULT_NAMES

SMALL_QUOTA: Final = 0.1
"""Cores below which the import of a framework takes minutes."""

SMALL_MEMORY: Final = 1 << 30
"""Bytes below which a worker of TensorFlow, which needs 0.6 GB without a model, hardly fits."""


def check_cores(affinity: int, machine: int, quotas: Sequence[float]) -> Finding:
    """Checks the CPU time that this process may use."""
    text = f"{affinity} of {machine} cores"
    quota = min(quotas, default=float("inf"))
    if quota >= affinity:
        return ok("CPU", text + (f", and a CPU quota of {quota:g} cores" if quotas else ""))
    text += f", but a CPU quota of {quota:g} cores"
    if quota < SMALL_QUOTA:
        remedy = "raise the quota to a core for each worker (docker run --cpus, limits.cpu)"
        return problem("CPU", f"{text}: the import of a framework takes minutes", remedy)
    text += ": threads beyond it throttle each other, which makes steps irregular"
    variables = "OMP_NUM_THREADS, TF_NUM_INTRAOP_THREADS"
    return note("CPU", text, f"use {max(1, int(quota))} threads ({variables}), or raise it")


def check_memory(total: int, available: int, limit: int | None) -> Finding:
    """Checks the memory that this process may use."""
    text = f"{available / 1e9:.1f} GB available of {total / 1e9:.1f} GB"
    if limit is not None and limit < total:
        text += f", and a limit of {limit / 1e9:.1f} GB"
    if min(available, limit or total) < SMALL_MEMORY:
        remedy = "raise the limit, end other processes, or start fewer workers here"
        return note("memory", f"{text}: a worker needs 0.6 GB without a model", remedy)
    return ok("memory", text)


def check_gpus(
    environment: Mapping[str, str], has_device: bool, import_nvml: Callable[[], Any] = import_nvml
) -> Iterator[Finding]:
    """Checks the GPUs of this machine, and whether their use can be measured."""
    if not has_device:
        yield ok("GPU", "there is none: workers train on the CPU")
        return
    if hides_gpus(environment):
        yield ok("GPU", "CUDA_VISIBLE_DEVICES hides all of them: workers train on the CPU")
        return
    try:
        with opened_nvml(import_nvml) as nvml:
            yield _gpus(nvml)
    except ModuleNotFoundError:
        text = "its use cannot be measured, because nvidia-ml-py is not installed: predictors do "
        text += "not see other users of the GPU"
        yield note("GPU", text, "pip install nvidia-ml-py")
    except Exception as error:  # NVMLError, or OSError of the library
        remedy = "install the driver's library libnvidia-ml.so.1 (in a container: the runtime's)"
        yield note("GPU", f"its use is unknown, because NVML does not start: {error}", remedy)


def _gpus(nvml: Any) -> Finding:
    try:
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        names = ", ".join(text_of(nvml.nvmlDeviceGetName(handle)) for handle in handles)
        driver = text_of(nvml.nvmlSystemGetDriverVersion())
    except Exception as error:
        return problem("GPU", f"NVML fails: {error}", "see `nvidia-smi`")
    return ok("GPU", f"{names or 'there is none'}; driver {driver}")


def check_speeds(open_quotas: Callable[..., Throttle | None] = open_quotas) -> Finding:
    """Checks the rights that ``lbbsp launch --speeds`` needs; removes the cgroups again."""
    quotas = open_quotas([min(0.5, available_cores())], PERIOD_US)  # the kernel permits no more
    if quotas is not None:
        quotas.close()
        return ok("launch --speeds", "may create cgroups with CPU quotas")
    text = "may not create cgroups with CPU quotas: it stops and continues the workers every "
    text += f"{CYCLE_SECONDS * 1000:g} ms instead, which is coarser"
    delegation = "have a cgroup delegated to you (systemd-run --user --scope -p Delegate=1)"
    return note("launch --speeds", text, f"run as root, or {delegation}")


def check_drivers(names: Sequence[str]) -> Finding:
    """Checks which driving factors of the speed can be read."""
    missing = [name for name in DEFAULT_NAMES if name not in names]
    text = ", ".join(names) or "none"
    if not missing:
        return ok("driving factors", text)
    text += f"; unavailable: {', '.join(missing)}. Predictors do not see them"
    remedy = "mount /proc and /sys/fs/cgroup in the container, if this is one"
    return note("driving factors", text, remedy)


def check_allocator(environment: Mapping[str, str]) -> Finding:
    """Checks whether glibc keeps freed memory, see docs/cpu-workers.md."""
    if not allocator_defaults(environment):
        return ok("allocator", "is tuned by its variables, or tensors are on a GPU")
    settings = " ".join(f"{name}={value}" for name, value in KEEP_FREED_MEMORY.items())
    text = "returns freed memory to the kernel, which clears every page of the next tensors: "
    text += "steps of MXNet take longer (`lbbsp launch` sets the variables itself)"
    return note("allocator", text, f"export {settings}")


def check_machine(environment: Mapping[str, str]) -> list[Finding]:
    """Runs all checks of this machine."""
    host = Host()
    limit, memory = memory_limit(host), psutil.virtual_memory()
    with ResourceSampler() as sampler:
        drivers = sampler.names
    return [
        check_cores(len(host.cores), os.cpu_count() or 1, cpu_quotas(host)),
        check_memory(memory.total, memory.available, limit.limit if limit else None),
        *check_gpus(environment, any(map(Path.exists, GPU_DEVICES))),
        check_speeds(),
        check_drivers(drivers),
        check_allocator(environment),
    ]
