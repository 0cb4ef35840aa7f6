"""What nvidia-ml-py tells of the GPU that this process computes on."""

from __future__ import annotations

import importlib
from typing import Any, final

from lbbsp_core.resources.base import Factor
from lbbsp_core.resources.host import Host


@final
class Gpu:
    """Utilisation and memory of one NVIDIA GPU.

    Both are of the device, so that others who share it are seen in them. The driver averages
    utilisation over up to a second itself. Parts of a GPU (MIG) tell their memory only.

    Args:
        host: Its ``CUDA_VISIBLE_DEVICES`` says which GPUs are ours.
        index: Which of those, as frameworks count. Numbers are taken in the order of the PCI
            bus; where unlike GPUs are mixed set ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, as CUDA else
            counts the fastest as the first.

    Raises:
        OSError: No such GPU, no driver, or ``pip install 'lbbsp[gpu]'`` was not done.
    """

    shortest = 0.0
    factors = (Factor("gpu_percent"), Factor("gpu_memory_percent"))

    def __init__(self, host: Host, index: int = 0) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
        except Exception as error:  # no package, no library, no driver: each has its own
            raise OSError(f"no NVIDIA GPU can be asked: {error}") from error
        try:
            visible = host.environ.get("CUDA_VISIBLE_DEVICES")
            self._device = self._handle(visible, index)
            self._tells_use = self._try_use()
            self._nvml.nvmlDeviceGetMemoryInfo(self._device)
        except Exception as error:
            self.close()
            raise OSError(f"GPU {index} cannot be asked: {error}") from error

    def _handle(self, visible: str | None, index: int) -> Any:
        """The device that CUDA calls `index`."""
        if visible is None:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        names = [name.strip() for name in visible.split(",")]
        name = names[index] if index < len(names) else ""
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.startswith(("GPU-", "MIG-")):
            return self._nvml.nvmlDeviceGetHandleByUUID(name)
        raise ValueError(f"CUDA_VISIBLE_DEVICES={visible!r} shows no device {index}")

    def _try_use(self) -> bool:
        try:
            self._nvml.nvmlDeviceGetUtilizationRates(self._device)
        except self._nvml.NVMLError:
            return False
        return True

    def read(self) -> tuple[float, ...]:
        """Percents."""
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._device)
        use = 0.0
        if self._tells_use:
            use = float(self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu)
        return use, 100.0 * memory.used / memory.total

    def close(self) -> None:
        """Tell the library that we do not need it any more."""
        self._nvml.nvmlShutdown()
