"""Handshake: facts that must be the same on all workers, and what workers are called."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lbbsp_core.resources.gpu import gpu_name
from lbbsp_core.resources.host import Host
from lbbsp_core.runtime.exchange.collectives import (
    Collectives,
    from_integers,
    gather_bytes,
    to_integers,
)
from lbbsp_core.runtime.exchange.protocol import DisagreementError, fingerprint
from lbbsp_core.runtime.options import env
from lbbsp_core.validate import one_line

Facts = Mapping[str, "int | str"]
"""Facts by name: integers, or texts of any length."""

_LONGEST = 10_000
_BEFORE, _AFTER = 60, 150
"""Characters of a text that are shown before and after the place where it differs from another."""

_REMEDIES = {
    "number of samples": "pass the whole data set to all workers, without shard(...) or x[rank::n]",
    "weighting of the loss": "compute the same loss on all workers, or, if it is a mean over "
    'samples that one of them rounds too coarsely, pass weight_by="samples"',
}


def compare(collectives: Collectives, facts: Facts) -> None:
    """Raises if workers do not agree on facts; a collective."""
    numbers = {n: fingerprint(x) if isinstance(x, str) else int(x) for n, x in facts.items()}
    rows = _gathered(collectives, numbers)
    if any(row != rows[0] for row in rows):  # seen by all workers, which now tell their texts
        rows = _gathered(collectives, {name: _shortened(fact) for name, fact in facts.items()})
        names = list(dict.fromkeys(name for row in rows for name in row))
        compare_facts(names, [[row.get(name) for name in names] for row in rows])


def _gathered(collectives: Collectives, facts: Facts) -> list[dict[str, int | str]]:
    return [json.loads(row) for row in gather_bytes(collectives, json.dumps(facts).encode())]


def compare_facts(names: Sequence[str], rows: Sequence[Sequence[int | str | None]]) -> None:
    """Raises if the workers' facts, in rows by rank, are not the same.

    Raises:
        DisagreementError: A fact differs; names the fact, the ranks and their values.
    """
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        for rank, value in enumerate(values):
            if value != values[0]:
                first, other = _excerpts(str(values[0]), str(value))
                remedy = _REMEDIES.get(name, f"start all workers with the same {name}")
                raise DisagreementError(
                    f"workers disagree on {name}: worker 0 has {first}, worker {rank} has {other}; "
                    f"{remedy}"
                )


def _shortened(fact: int | str) -> int | str:
    """Returns what is told of a fact: of a very long text its start, and a fingerprint."""
    if not isinstance(fact, str):
        return int(fact)
    return fact if len(fact) <= _LONGEST else f"{fact[:_LONGEST]} ({fingerprint(fact):x})"


def _excerpts(*texts: str) -> list[str]:
    """Returns two texts around their first difference."""
    common = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    start = max(0, common - _BEFORE) if max(map(len, texts)) > _AFTER else 0
    end = start + _BEFORE + _AFTER
    return ["..." * (start > 0) + text[start:end] + "..." * (len(text) > end) for text in texts]


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices on which a process computes.

    Args:
        names: Device of each worker in the process, as a short text; empty: its cores.
        are_gpus: Whether they are GPUs.
        show_memory: Whether their memory in use is what batches need, because the framework does
            not take all of it in advance.
        number: Number of the first one among the visible GPUs, whose use and memory are sampled.
    """

    names: tuple[str, ...] = ()
    are_gpus: bool = False
    show_memory: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """Names by which users know a process; no decision depends on them.

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


class Peer(NamedTuple):
    """What a worker has told in the handshake: `Balancer.static_info`, and its names."""

    static_info: list[int]
    identity: Identity


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
