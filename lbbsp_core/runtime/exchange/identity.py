"""Host name and devices of each worker, which workers tell each other in the handshake.

Names are shown to users only: no decision depends on them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from lbbsp_core.resources.gpu import gpu_name
from lbbsp_core.resources.host import Host
from lbbsp_core.runtime.exchange.collectives import from_integers, to_integers
from lbbsp_core.runtime.options import env
from lbbsp_core.validate import one_line


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices on which a process computes.

    Args:
        names: Device of each worker in the process, as a short text; empty: its cores.
        are_gpus: Whether they are GPUs.
        show_memory: Whether their memory in use is what batches need, because the framework does
            not take all of it in advance.
    """

    names: tuple[str, ...] = ()
    are_gpus: bool = False
    show_memory: bool = False


@dataclass(frozen=True, slots=True)
class Identity:
    """Names by which users know a process.

    Args:
        host: Name of its machine.
        devices: Device of each worker in the process: one, or one for each replica.
    """

    host: str = ""
    devices: tuple[str, ...] = ()

    @classmethod
    def here(cls, devices: Sequence[str] = ()) -> Identity:
        """Returns the identity of this process."""
        host = env.host() or socket.gethostname()
        return cls(one_line(host), tuple(map(one_line, devices or [cpu()])))

    def pack(self) -> list[int]:
        """Packs the names into integers, to which padding may be appended."""
        data = json.dumps([self.host, *self.devices], ensure_ascii=False).encode()
        return [len(data), *to_integers(data)]

    @classmethod
    def unpack(cls, row: Sequence[int]) -> Identity:
        """Unpacks a row; the inverse of `pack`. An empty row is unknown."""
        if not row or not row[0]:
            return cls()
        length, *integers = row
        host, *devices = json.loads(from_integers(integers)[:length])
        return cls(host, tuple(devices))

    def device(self, rank: int) -> str:
        """Returns the device of a worker of this process; all processes have as many."""
        return self.devices[rank % len(self.devices)] if self.devices else ""


def cpu() -> str:
    """Returns the cores on which this process may run, as "cpu, 2 cores"."""
    cores = len(Host().cores)
    return f"cpu, {cores} core{'s' * (cores != 1)}"


def gpu(index: int) -> str:
    """Returns the name of a visible NVIDIA GPU; "gpu 0" if it cannot be read."""
    try:
        return gpu_name(index)
    except Exception:  # of NVML, or of its import: the name is only shown
        return f"gpu {index}"
