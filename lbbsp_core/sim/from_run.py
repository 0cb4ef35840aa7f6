"""Clusters and traces from run records, to try other schemes and predictors on a real run."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lbbsp_core.runtime.record.named import read_named_run
from lbbsp_core.runtime.record.record import RunHeader, StepLine
from lbbsp_core.sim.cluster import MIN_STEPS, ReplayedCluster, replay_trace
from lbbsp_core.sim.traces import LARGEST_DRIVER, Series, Trace
from lbbsp_core.types import Measurement, is_plausible


class RecordedRun(NamedTuple):
    """Cluster and times of a recorded run.

    Args:
        cluster: Workers with the speeds that they had in each step.
        communication_seconds: Median time of a step beyond that of its slowest worker: what is not
            hidden.
        step_seconds: Median wall time of the replayed steps.
    """

    cluster: ReplayedCluster
    communication_seconds: float
    step_seconds: float


def cluster_from_run(path: str | Path) -> RecordedRun:
    """Reads ``run.jsonl`` (or the folder that holds it) of a plain BSP run.

    Short steps and those with an excluded or missing measurement (the first step of an epoch
    includes tracing or loading) are left out, with a note: they do not show the workers' speeds.
    Predictors get the driving factors as in `trace_from_run`, if the run has recorded any.
    Seconds are taken as proportional to samples, because the batches of a plain run do not change:
    where iterations have a large fixed overhead, the gain of a policy is overestimated.

    Raises:
        ValueError: The file is no record of steps, or has a single worker or too few steps.
    """
    trace, usable = _trace(path)
    if len(trace.series) < 2:
        raise ValueError(
            f"{path}: a single worker waits for no other worker: record two or more workers"
        )
    walls = [line.wall_seconds for line in usable]
    communication = statistics.median(
        wall - max(line.busy_seconds) for wall, line in zip(walls, usable, strict=True)
    )
    cluster = replace(replay_trace(trace), notes=trace.notes)
    return RecordedRun(cluster, max(communication, 0.0), statistics.median(walls))


def trace_from_run(path: str | Path) -> Trace:
    """Reads ``run.jsonl`` (or the folder that holds it) as a trace, to evaluate predictors on it.

    The same steps are left out as in `cluster_from_run`. Each worker's speeds are those at the
    batch sizes of the run, and its drivers those that it knew before each step. A driver that a
    worker never has is 0, and one that it lacks in a step keeps its last value, as in a predictor;
    steps without any drivers are left out if other steps have some.

    Raises:
        ValueError: The file is no record of steps, or has too few steps.
    """
    return _trace(path)[0]


def _trace(path: str | Path) -> tuple[Trace, list[StepLine]]:
    """Returns the trace of a record, and its lines."""
    header, usable, notes = _read(path)
    sampled = (name for line in usable for name in line.drivers)
    names = tuple(dict.fromkeys([*header.drivers, *sampled]))
    workers = len(usable[0].sizes)
    unknown = (None,) * workers
    drivers = np.array(  # shape (steps, names, workers), NaN where a worker lacks one
        [[line.drivers.get(name, unknown) for name in names] for line in usable], np.float64
    ).reshape(len(usable), len(names), workers)
    is_known = [bool(line.drivers) for line in usable] & (
        ~(np.abs(drivers) >= LARGEST_DRIVER).any(axis=(1, 2))
    )
    if is_known.any():
        if without := int((~is_known).sum()):
            notes += (f"steps left out because their driving factors are unknown: {without}",)
        usable = [line for line, flag in zip(usable, is_known, strict=True) if flag]
        drivers = drivers[is_known]
        for name, never in zip(names, np.isnan(drivers).all(axis=0), strict=True):
            if never.any():
                ranks = ", ".join(map(str, np.flatnonzero(never)))
                notes += (f"{name} is 0 for workers that do not have it: {ranks}",)
    elif names:
        notes += ("no step has driving factors: predictors learn from the speeds only",)
        names, drivers = (), drivers[:, :0]
    # A driver that a worker lacks in a step keeps its last value, and is 0 before the first one.
    last = np.where(np.isnan(drivers), 0, np.arange(len(usable))[:, None, None])
    filled = np.take_along_axis(drivers, np.maximum.accumulate(last, axis=0), axis=0)
    filled = np.where(np.isnan(filled), 0.0, filled)
    steps = np.array([line.step for line in usable], np.int64)
    series = []
    for rank in range(workers):
        pairs = zip(usable, filled[:, :, rank].tolist(), strict=True)
        measured = [Measurement(x.amounts[rank], x.busy_seconds[rank], tuple(d)) for x, d in pairs]
        series.append(Series(rank, steps, tuple(measured)))
    folder = Path(path)
    trace = Trace(folder if folder.name else folder.resolve(), names, tuple(series), notes)
    return trace, usable


def _read(path: str | Path) -> tuple[RunHeader, list[StepLine], tuple[str, ...]]:
    """Reads the steps that show the speeds of all workers, and notes on the others."""
    run = read_named_run(path)
    if run.pushes:
        raise ValueError(
            f"{path} records pushes, not steps, as asynchronous training does, also with BSP: "
            "record a run of synchronous training with policy=Even()"
        )
    steps = run.with_same_workers()
    usable = [
        line
        for line in steps
        if line.is_regular
        and all(map(is_plausible, (*line.busy_seconds, *line.sizes, line.wall_seconds)))
    ]
    if len(usable) < MIN_STEPS:
        raise ValueError(
            f"{path}: only {len(usable)} of {len(steps)} steps are usable, at least "
            f"{MIN_STEPS} are needed: record a longer run"
        )
    notes = []
    if before := len(run.steps) - len(steps):
        notes.append(f"steps left out because they had another number of workers: {before}")
    if omitted := len(steps) - len(usable):
        notes.append(f"steps left out because they were excluded or short: {omitted}")
    if any(line.sizes != usable[0].sizes and not line.work for line in usable):
        notes.append(
            "the batch sizes change: this was no plain BSP run, and its speeds were measured at "
            "the batch sizes that its policy chose"
        )
    return run.header, usable, tuple(notes)
