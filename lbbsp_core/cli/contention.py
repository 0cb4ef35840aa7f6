"""Values of the option ``--contention``: a trace to replay, or random neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from lbbsp_core.files import is_file_name
from lbbsp_core.launch import Contention, Phase
from lbbsp_core.launch.contention import HOUR, bursty, replayed
from lbbsp_core.registry import Component, Registry
from lbbsp_core.sim.slowdowns import Disturbance
from lbbsp_core.sim.traces import Trace, TraceError, read_trace
from lbbsp_core.validate import require_integer

COLUMN: Final = "cpu_other_percent"

EPOCH_SECONDS: Final = 20.0
"""Duration of an epoch of ``dbs``, of which a slow worker loses 5 to 10 s."""


class Neighbours(Protocol):
    """Random neighbours of workers."""

    def schedules(self, workers: int) -> Contention:
        """Returns the schedule of each worker's neighbours."""


@dataclass(frozen=True)
class Bursty:
    """Neighbours that start and stop at random."""

    seed: int = 0

    def schedules(self, workers: int) -> Contention:
        """Returns schedules that differ by worker."""
        require_integer("seed", self.seed, 0)
        return [bursty(worker, self.seed) for worker in range(workers)]


@dataclass(frozen=True)
class Disturbed:
    """Disturbance of the DBS paper (arXiv 2007.11831).

    In each epoch a healthy worker becomes slow with probability 0.1, for 4 to 20 epochs. A
    neighbour then takes 5 to 10 s of each `EPOCH_SECONDS`, the same fraction in each of its epochs.
    """

    seed: int = 0
    epoch_seconds: float = EPOCH_SECONDS

    def schedules(self, workers: int) -> Contention:
        """Returns the schedules of an hour."""
        require_integer("seed", self.seed, 0)
        if not 0.1 <= self.epoch_seconds <= HOUR:
            raise ValueError(
                f"epoch_seconds must be from 0.1 to {HOUR:g}, got {self.epoch_seconds:g}: give "
                "them after the second colon, such as dbs:0:20, or omit them"
            )
        rng, epochs = np.random.default_rng(self.seed), math.ceil(HOUR / self.epoch_seconds)
        lost = np.array(list(Disturbance().lost_seconds(rng, epochs, workers)))
        return [
            [Phase(self.epoch_seconds, (float(demand),)) for demand in column / EPOCH_SECONDS]
            for column in lost.T
        ]


NEIGHBOURS: Final[Registry[Neighbours]] = Registry(
    "contention", Neighbours, Component("bursty", Bursty), Component("dbs", Disturbed)
)


def parse_contention(text: str, workers: int) -> Contention:
    """Returns schedules of a trace, ``bursty[:SEED]`` or ``dbs[:SEED[:EPOCH_SECONDS]]``."""
    if text.partition(":")[0] not in NEIGHBOURS and is_file_name(text, ".csv"):
        return replayed_trace(read_trace(Path(text)))
    return NEIGHBOURS.build(text).schedules(require_integer("workers", workers, 1))


def replayed_trace(trace: Trace) -> Contention:
    """Returns schedules that replay what was recorded, at the speed of the recording."""
    if COLUMN not in trace.drivers:
        raise TraceError(
            f"{trace.path}, line 1: no column {COLUMN!r} among {', '.join(trace.drivers) or 'none'}"
            " of drivers, which contention replays: choose a trace that has it, or 'bursty'"
        )
    place = trace.drivers.index(COLUMN)
    return [
        replayed((float(row.busy_seconds), row.drivers[place]) for row in series.measurements)
        for series in trace.series
    ]
