"""Values of the option ``--contention``: a trace to replay, or random neighbours."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np

from lbbsp_core.launch import Contention, Phase
from lbbsp_core.launch.contention import HOUR, bursty, replayed
from lbbsp_core.sim.slowdowns import Disturbance
from lbbsp_core.sim.traces import Trace, TraceError, read_trace

COLUMN: Final = "cpu_other_percent"

EPOCH_SECONDS: Final = 20.0
"""Duration of an epoch of ``dbs``, of which a slow worker loses 5 to 10 s."""


def parse_contention(text: str, workers: int) -> Contention:
    """Returns schedules of a trace, ``bursty[:SEED]`` or ``dbs[:SEED[:EPOCH_SECONDS]]``."""
    kind, *options = text.split(":")
    if len(options) > {"bursty": 1, "dbs": 2}.get(kind, -1):
        return replayed_trace(read_trace(Path(text)))
    seed, epoch_seconds = _numbers(text, *options)
    if kind == "bursty":
        return [bursty(worker, seed) for worker in range(workers)]
    return disturbed(workers, seed, epoch_seconds)


def replayed_trace(trace: Trace) -> Contention:
    """Returns schedules that replay what was recorded, at the speed of the recording."""
    if COLUMN not in trace.drivers:
        raise TraceError(
            f"{trace.path}, line 1: no column {COLUMN!r} among {', '.join(trace.drivers) or 'none'}"
            " of drivers, which contention replays: choose a trace that has it, or 'bursty'"
        )
    place = trace.drivers.index(COLUMN)
    return [
        replayed((float(each.busy_seconds), each.drivers[place]) for each in series.measurements)
        for series in trace.series
    ]


def disturbed(workers: int, seed: int, epoch_seconds: float) -> Contention:
    """Returns schedules with the disturbance of the DBS paper (arXiv 2007.11831).

    In each epoch a healthy worker becomes slow with probability 0.1, for 4 to 20 epochs. A
    neighbour then takes 5 to 10 s of each `EPOCH_SECONDS`, the same fraction in each of its epochs.
    """
    rng, epochs = np.random.default_rng(seed), math.ceil(HOUR / epoch_seconds)
    lost = np.array(list(Disturbance().lost_seconds(rng, epochs, workers)))
    return [
        [Phase(epoch_seconds, (float(demand),)) for demand in column / EPOCH_SECONDS]
        for column in lost.T
    ]


def _numbers(text: str, seed: str = "0", seconds: str = str(EPOCH_SECONDS)) -> tuple[int, float]:
    """Returns the seed, and the seconds of an epoch."""
    if not seed.isdecimal():
        raise ValueError(
            f"--contention must have a seed >= 0 after the first colon, got {text!r}: "
            "give one, such as bursty:3, or omit it"
        )
    try:
        epoch = float(seconds)
    except ValueError:
        epoch = math.nan
    if not 0.1 <= epoch <= HOUR:
        raise ValueError(
            f"--contention must have the seconds of an epoch, from 0.1 to {HOUR:g}, after the "
            f"second colon, got {text!r}: give them, such as dbs:0:20, or omit them"
        )
    return int(seed), epoch
