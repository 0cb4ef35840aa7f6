"""Values of the option ``--contention``: a trace to replay, or random neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    if kind == "bursty" and len(options) <= 1:
        seed = _seed(text, options)
        return [bursty(worker, seed) for worker in range(workers)]
    if kind == "dbs" and len(options) <= 2:
        return disturbed(workers, _seed(text, options), _seconds(text, options))
    return replayed_trace(read_trace(Path(text)))


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


def _seed(text: str, options: Sequence[str]) -> int:
    if options and not options[0].isdecimal():
        raise ValueError(
            f"--contention must have a seed >= 0 after the first colon, got {text!r}: "
            "give one, such as bursty:3, or omit it"
        )
    return int(options[0]) if options else 0


def _seconds(text: str, options: Sequence[str]) -> float:
    try:
        seconds = float(options[1]) if len(options) > 1 else EPOCH_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= HOUR:
        raise ValueError(
            f"--contention must have the seconds of an epoch, from 0.1 to {HOUR:g}, after the "
            f"second colon, got {text!r}: give them, such as dbs:0:20, or omit them"
        )
    return seconds
