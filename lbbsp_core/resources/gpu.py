"""Utilisation and memory of the GPU that this process uses, read through nvidia-ml-py."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, final

from lbbsp_core.resources.base import Factor
from lbbsp_core.resources.host import Host


def count_gpus(devices: Path = Path("/dev")) -> int:
    """Returns the number of NVIDIA GPUs, without a framework; 0 where there is no driver.

    The driver is asked through nvidia-ml-py; if that is not installed, the device files are
    counted. MIG instances are not counted.
    """
    count = 0
    try:
        with opened_nvml() as nvml, suppress(Exception):
            count = int(nvml.nvmlDeviceGetCount())
    except Exception:  # a missing package, library or driver: different exceptions
        return sum(path.name[6:].isdecimal() for path in devices.glob("nvidia[0-9]*"))
    return count


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


@final
class Gpu:
    """Utilisation and memory of one NVIDIA GPU.

    Both values cover all processes on the device. The driver averages utilisation over up to one
    second. MIG instances report their memory only. GPUs are counted in the order of the PCI bus:
    where they differ, set ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, because CUDA counts the fastest one
    first otherwise.
    """

    min_interval_seconds = 0.0
    may_block = True  # the driver takes locks
    factors = (Factor("gpu_percent"), Factor("gpu_memory_percent"))

    def __init__(self, host: Host, index: int = 0) -> None:
        try:
            with ExitStack() as stack:  # closes the library unless all is well
                self._nvml = stack.enter_context(opened_nvml())
                self._device = self._handle(host.environ.get("CUDA_VISIBLE_DEVICES"), index)
                self._has_utilisation = self._supports_utilisation()
                self._nvml.nvmlDeviceGetMemoryInfo(self._device)
                self._opened = stack.pop_all()
        except Exception as error:  # a missing package, library or driver: different exceptions
            raise OSError(f"GPU {index} cannot be read: {error}") from error

    def _handle(self, visible: str | None, index: int) -> object:
        """Returns the handle of the device with the CUDA index `index`."""
        if visible is None:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        names = [name.strip() for name in visible.split(",")]
        name = names[index] if index < len(names) else ""
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.startswith(("GPU-", "MIG-")):
            return self._nvml.nvmlDeviceGetHandleByUUID(name)
        raise ValueError(f"CUDA_VISIBLE_DEVICES={visible!r} has no device {index}")

    def _supports_utilisation(self) -> bool:
        try:
            self._nvml.nvmlDeviceGetUtilizationRates(self._device)
        except self._nvml.NVMLError:
            return False
        return True

    @property
    def name(self) -> str:
        """Name of the product, such as "NVIDIA H100 80GB HBM3"."""
        return text_of(self._nvml.nvmlDeviceGetName(self._device))

    def read(self) -> tuple[float, ...]:
        """Returns percent of time that the GPU computed, and percent of its memory in use."""
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._device)
        utilisation = 0.0
        if self._has_utilisation:
            rates = self._nvml.nvmlDeviceGetUtilizationRates(self._device)
            utilisation = float(rates.gpu)
        return utilisation, 100.0 * memory.used / memory.total

    def close(self) -> None:
        """Shuts down this use of the NVML library."""
        self._opened.close()
