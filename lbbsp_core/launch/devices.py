"""GPUs of local workers: which devices each of them sees, by ``CUDA_VISIBLE_DEVICES``.

number of GPUs, or the user's CUDA_VISIBLE_DEVICES ──> one value per worker, kept in restarts
"""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from lbbsp_core.resources.gpu import count_gpus, gpu_uuids
from lbbsp_core.validate import shortened

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"

NO_GPU: Final[Mapping[str, str]] = {VARIABLE: "-1"}
"""Variables of a process that uses no GPU."""

_NAME: Final = re.compile(r"[0-9]+|(GPU|MIG)-\S+")
_SYNTAX: Final = "give each worker its devices, such as 0,1,2 or 0+1,2+3, or give none or all"


class Devices(NamedTuple):
    """GPUs of the workers."""

    environments: tuple[Mapping[str, str], ...]  # by the worker's number in the first attempt
    note: str | None = None  # to the user


def assign_devices(
    devices: str | Sequence[str] | None,
    workers: int,
    *,
    emulated: bool = False,
    may_mix: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> Devices | None:
    """Returns which GPUs each worker uses, or None to leave that to the environment.

    `devices` has one entry per worker: names with "+" between them, or "none". "none" alone is for
    all workers, "all" leaves the variables as they are, and None divides the user's
    CUDA_VISIBLE_DEVICES, or all GPUs. Emulated speeds hide the GPUs. Unless it `may_mix`, no worker
    may go without where others have some: TensorFlow's collectives do not permit it.
    """
    entries = entries_of(devices)
    if entries == ["none"] or (emulated and entries is None):
        return Devices((NO_GPU,) * workers)
    if emulated:
        raise ValueError(
            f"devices = {shortened(devices)} cannot be combined with emulated speeds or "
            "contention, which limit CPU time and hide the GPUs: omit one of them, or give "
            "devices none"
        )
    if entries == ["all"]:
        return None
    if entries is None:
        return _automatic(workers, environ, may_mix=may_mix)
    chosen = check_entries(entries, workers, may_mix=may_mix)
    named = [name for names in chosen for name in names]
    _check_usable(named, environ.get(VARIABLE))
    numbers = all(name.isdecimal() for name in named)
    return Devices(_environments(chosen, environ, number=numbers and VARIABLE not in environ))


def entries_of(devices: str | Sequence[str] | None) -> list[str] | None:
    """Returns the entries of an option, one per worker; "none" or "all" alone; None if omitted."""
    if devices is None:
        return None
    return devices.split(",") if isinstance(devices, str) else [*map(str, devices)]


def _automatic(workers: int, environ: Mapping[str, str], *, may_mix: bool) -> Devices | None:
    setting = environ.get(VARIABLE)
    names = [str(index) for index in range(count_gpus())] if setting is None else _usable(setting)
    if not names:
        return None
    chosen: Sequence[Sequence[str]] = [[names[i % len(names)]] for i in range(workers)]
    if setting is not None and len(names) >= workers:
        chosen = _divided(names, workers)
    note = _note(workers, names, setting, may_mix=may_mix)
    return Devices(_environments(chosen, environ, number=setting is None), note)


def _note(workers: int, names: Sequence[str], setting: str | None, *, may_mix: bool) -> str | None:
    """Returns what the user should know of an automatic choice, or None."""
    total = f"{len(names)} GPU{'s' * (len(names) != 1)}"
    if workers > len(names):
        return (
            f"{workers} workers share {total}, which NCCL does not support: start at most "
            f"{len(names)}, or let {'some' if may_mix else 'all'} of them use the CPU, by "
            f"{'an entry none of --devices' if may_mix else '--devices none'}"
        )
    divided, unused = _divided(names, workers), len(names) % workers
    if setting is None and len(divided[0]) > 1:
        entries = ",".join(map("+".join, divided))
        which = "more" if unused else "all"
        return f"each worker uses one of {total}: to use {which} of them, give --devices {entries}"
    if unused:
        return (
            f"{unused} of {total} {'is' if unused == 1 else 'are'} not used, because all workers "
            "need the same number of them: start a number of workers that divides "
            f"{len(names)} to use all"
        )
    return None


def _divided(names: Sequence[str], workers: int) -> list[Sequence[str]]:
    """Gives each worker the same number of names, in their order; the last ones may remain."""
    count = len(names) // workers
    return [names[count * worker : count * (worker + 1)] for worker in range(workers)]


def check_entries(entries: Sequence[str], workers: int, *, may_mix: bool) -> list[list[str]]:
    """Returns the names of each worker's devices; raises ValueError if they cannot be any."""
    if len(entries) != workers:
        raise ValueError(
            f"devices must have one entry per worker = {workers}, got {len(entries)} "
            f"({shortened(','.join(entries))}): {_SYNTAX}"
        )
    chosen: list[list[str]] = []
    for entry in entries:
        names = [] if entry.strip() == "none" else [name.strip() for name in entry.split("+")]
        if not all(map(_NAME.fullmatch, names)) or len(set(names)) < len(names):
            raise ValueError(
                "an entry of devices must be numbers or UUIDs of different GPUs, got "
                f"{shortened(entry)}: {_SYNTAX}"
            )
        chosen.append(names)
    if not may_mix and len(set(map(bool, chosen))) > 1:
        raise ValueError(
            "devices must be GPUs for all workers, or none for all, in TensorFlow's collectives, "
            f"got {shortened(','.join(entries))}: give each worker a GPU, or give none"
        )
    return chosen


def _check_usable(named: Sequence[str], setting: str | None) -> None:
    """Raises ValueError if a device is not there, or was not given to the launcher."""
    if setting is not None:
        if foreign := [name for name in named if name not in _usable(setting)]:
            raise ValueError(
                f"devices must be among those of CUDA_VISIBLE_DEVICES = {setting!r}, got "
                f"{foreign[0]}: choose from these, or unset the variable"
            )
        return
    count = count_gpus()
    if named and not count:
        raise ValueError(
            f"devices must be GPUs of this machine ({socket.gethostname()}), on which none is "
            f"found, got {named[0]}: give none, or install nvidia-ml-py if there are some"
        )
    uuids = gpu_uuids()
    for name in named:
        if name.isdecimal() and int(name) >= count:
            raise ValueError(
                f"devices must be numbers from 0 to {count - 1}, because this machine has {count} "
                f"GPUs, got {name}: choose from these"
            )
        if name.startswith("GPU-") and uuids and not any(u.startswith(name) for u in uuids):
            raise ValueError(
                f"devices must be GPUs of this machine ({', '.join(uuids)}), got {name}: choose "
                "from these"
            )


def _usable(setting: str) -> list[str]:
    """Returns the devices of CUDA_VISIBLE_DEVICES; CUDA ignores all after an invalid name."""
    return list(takewhile(_NAME.fullmatch, (name.strip() for name in setting.split(","))))


def _environments(
    chosen: Sequence[Sequence[str]], environ: Mapping[str, str], *, number: bool
) -> tuple[Mapping[str, str], ...]:
    """Returns the variables of each worker.

    `number` makes CUDA number the devices as the driver does: it would number the fastest first.
    """
    defaults = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if number else {}
    uses = Counter(name for names in chosen for name in names)
    environments = []
    for names in chosen:
        entries = {VARIABLE: ",".join(names) or NO_GPU[VARIABLE], **defaults}
        if any(uses[name] > 1 for name in names):
            entries["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"  # else the first takes all of the memory
        environments.append({k: v for k, v in entries.items() if k == VARIABLE or k not in environ})
    return tuple(environments)
