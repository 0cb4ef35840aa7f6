"""Processes on other hosts: the command that stands for each of them here, see ``_relay``."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lbbsp_core._version import __version__
from lbbsp_core.launch import _relay
from lbbsp_core.launch.devices import VARIABLE, check_entries, entries_of
from lbbsp_core.launch.hosts import Hosts

FORWARDED: Final = re.compile(
    r"(LBBSP|TF|XLA|KERAS|DMLC|MXNET|PS|GRPC|TORCH|GLOO|NCCL|CUDA|OMP|MKL|KMP|OPENBLAS|MALLOC|LC)_.*"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|PYTHON\w*|PORT|GLIBC_TUNABLES|LD_LIBRARY_PATH|LANG"
)
"""Variables that processes on other hosts get from the launcher."""

OF_A_HOST: Final = ("LBBSP_HOST", "LBBSP_JOB", "LBBSP_MARKS", VARIABLE)
"""The launcher's own are not passed, unless they are named."""


@dataclass(frozen=True)
class Elsewhere:
    """How the processes of a job start on other hosts: in this folder, by this Python.

    `devices` are entries of the workers as in `assign_devices`, whose devices are those of the
    hosts. `names` are of variables that the processes get beside `FORWARDED`.
    """

    hosts: Hosts
    devices: Sequence[str] | None = None
    names: Sequence[str] = ()

    def of(self, members: Sequence[int]) -> Elsewhere:
        """Returns that of some workers."""
        return Elsewhere(self.hosts.of(members), self._devices(members), self.names)

    def _devices(self, ranks: Sequence[int]) -> Sequence[str] | None:
        """Returns the entries of some workers; a word for all remains."""
        named = self.devices not in (None, ["none"], ["all"])
        return [self.devices[rank] for rank in ranks] if self.devices and named else self.devices

    def command(
        self, command: Sequence[str], environment: Mapping[str, str], rank: int, *, is_worker: bool
    ) -> list[str]:
        """Returns the arguments of Python that stand here for a process on the host of a worker."""
        places = self.hosts.addresses
        beside = [i for i, place in enumerate(places) if place == places[rank]]
        names = [n for n in environment if FORWARDED.fullmatch(n) or n in self.names]
        description = {
            "version": __version__,
            "host": self.hosts.names[rank],
            "python": sys.executable,
            "directory": os.getcwd(),
            "command": list(command),
            "worker": rank,
            "place": [beside.index(rank) if is_worker else None, len(beside)],
            "devices": self._devices(beside),
            "names": [name for name in names if name in self.names or name not in OF_A_HOST],
        }
        return ["-I", "-S", "-X", "utf8", _relay.__file__, json.dumps(description)]


def by_ssh(
    hosts: Hosts, devices: str | Sequence[str] | None, names: Sequence[str], *, may_mix: bool
) -> Elsewhere:
    """Checks how processes start on other hosts, before any is started."""
    if shutil.which("ssh") is None:
        raise ValueError(
            "hosts need the program ssh, which is not on PATH: install OpenSSH's client, or start "
            "each worker on its host with --rank"
        )
    for name in names:
        if name not in os.environ:
            raise ValueError(f"env must name variables that are set, got {name!r}: set it here")
    entries = entries_of(devices)
    if entries is not None and entries not in (["none"], ["all"]):
        check_entries(entries, len(hosts.names), may_mix=may_mix)
    return Elsewhere(hosts, entries, names)
