"""Utilisation and memory of the GPU that this process uses, read through nvidia-ml-py."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lbbsp_core.resources.base import Factor, Source
from lbbsp_core.resources.host import Host


def count_gpus(devices: Path = Path("/dev")) -> int:
    """Returns the number of NVIDIA GPUs, without a framework; 0 where there is no driver.

    The driver is asked through nvidia-ml-py; if that is not installed, the device files are
    counted. MIG instances are not counted.
    """
    try:
        with opened_nvml() as nvml, suppress(Exception):
            return int(nvml.nvmlDeviceGetCount())
    except Exception:  # a missing package, library or driver: different exceptions
        return sum(path.name[6:].isdecimal() for path in devices.glob("nvidia[0-9]*"))
    return 0


def gpu_uuids() -> list[str]:
    """Returns the UUIDs of the NVIDIA GPUs; empty where nvidia-ml-py cannot tell."""
    with suppress(Exception), opened_nvml() as nvml:  # as above
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        return [text_of(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    return []


def driver_version() -> str:
    """Returns the version of the NVIDIA driver, such as "570.86.10"; empty if it is unknown."""
    with suppress(Exception), opened_nvml() as nvml:  # as above
        return text_of(nvml.nvmlSystemGetDriverVersion())
    return ""


def import_nvml() -> Any:
    """Imports NVIDIA's library."""
    return importlib.import_module("pynvml")


@contextmanager
def opened_nvml(load: Callable[[], Any] = import_nvml) -> Iterator[Any]:
    """Opens NVIDIA's library inside the context."""
    nvml = load()
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


def hides_gpus(environ: Mapping[str, str]) -> bool:
    """Returns whether ``CUDA_VISIBLE_DEVICES`` hides all GPUs.

    CUDA ignores all devices after an invalid one, such as -1.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and re.match(r"\s*([0-9]|GPU-|MIG-)", visible) is None


def text_of(value: str | bytes) -> str:
    """Returns a text of NVML, of which old versions return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def gpu_name(index: int = 0) -> str:
    """Returns the name of a visible GPU, such as "NVIDIA H100"; may raise any exception."""
    with opened_nvml() as nvml:
        return text_of(nvml.nvmlDeviceGetName(_handle(nvml, os.environ, index)))


def gpu_use(host: Host) -> Source:
    """Utilisation and memory of the GPU of this process.

    Both values cover all processes on the device. The driver averages utilisation over up to one
    second. MIG instances report their memory only. GPUs are counted in the order of the PCI bus:
    where they differ, set ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, because CUDA counts the fastest one
    first otherwise.
    """
    nvml = host.opened.enter_context(opened_nvml())
    device, has_utilisation = _handle(nvml, host.environ, host.gpu), False
    with suppress(nvml.NVMLError):
        nvml.nvmlDeviceGetUtilizationRates(device)
        has_utilisation = True

    def read() -> tuple[float, ...]:
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        used = nvml.nvmlDeviceGetUtilizationRates(device).gpu if has_utilisation else 0
        return float(used), 100.0 * memory.used / memory.total

    factors = Factor("gpu_percent"), Factor("gpu_memory_percent")
    return Source(factors, read, min_interval_seconds=0.0, may_block=True)  # the driver takes locks


def _handle(nvml: Any, environ: Mapping[str, str], index: int) -> object:
    """Returns the handle of the device with the CUDA index `index`."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    names = [name.strip() for name in visible.split(",")]
    name = names[index] if index < len(names) else ""
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    if name.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    raise ValueError(f"CUDA_VISIBLE_DEVICES={visible!r} has no device {index}")
