"""Clusters from run records, to simulate other schemes on the speeds of a real run."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lbbsp_core.runtime.record import StepLine, read_run
from lbbsp_core.sim.cluster import MIN_STEPS, ReplayedCluster
from lbbsp_core.types import is_plausible


class RecordedRun(NamedTuple):
    """Cluster and times of a recorded run.

    Args:
        cluster: Workers with the speeds that they had in each step.
        communication_seconds: Median time of a step beyond that of its slowest worker.
        step_seconds: Median wall time of the replayed steps.
    """

    cluster: ReplayedCluster
    communication_seconds: float
    step_seconds: float


def cluster_from_run(path: str | Path) -> RecordedRun:
    """Reads ``run.jsonl`` (or the folder that holds it) of a plain BSP run.

    Short steps and those with an excluded or missing measurement (the first step of an epoch
    includes tracing or loading) are left out, with a note: they do not show the workers' speeds.
    Seconds are taken as proportional to samples, because the batches of a plain run do not change:
    where iterations have a large fixed overhead, the gain of a policy is overestimated.

    Raises:
        ValueError: The file is no record of steps, or has a single worker or too few steps.
    """
    try:
        run = read_run(path)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read as a run record ({error}): name the --run-dir of lbbsp launch"
        ) from None
    if run.pushes:
        raise ValueError(
            f"{path} records pushes, of workers that were not in the same step: record a plain BSP "
            "run"
        )
    steps = run.with_same_workers()
    usable = [line for line in steps if _is_usable(line)]
    if len(usable) < MIN_STEPS:
        raise ValueError(
            f"{path}: only {len(usable)} of {len(steps)} steps are usable, at least "
            f"{MIN_STEPS} are needed: record a longer run"
        )
    sizes = np.array([line.sizes for line in usable], np.float64)
    busy = np.array([line.busy_seconds for line in usable], np.float64)
    if sizes.shape[1] < 2:
        raise ValueError(
            f"{path}: a single worker waits for no other worker: record two or more workers"
        )
    walls = np.array([line.wall_seconds for line in usable], np.float64)
    notes = []
    if before := len(run.steps) - len(steps):
        notes.append(f"steps left out because they had another number of workers: {before}")
    if omitted := len(steps) - len(usable):
        notes.append(f"steps left out because they were excluded or short: {omitted}")
    if (sizes != sizes[0]).any():
        notes.append(
            "the batch sizes change: this was no plain BSP run, and its speeds were measured at "
            "the batch sizes that its policy chose"
        )
    cluster = ReplayedCluster(
        sizes / busy,
        (((),) * sizes.shape[1],) * len(usable),
        round(statistics.median(sizes.sum(axis=1).tolist())),
        tuple(notes),
    )
    communication = float(np.median(walls - busy.max(axis=1)))
    return RecordedRun(cluster, max(communication, 0.0), float(np.median(walls)))


def _is_usable(line: StepLine) -> bool:
    """Returns whether a step is regular, and all workers were measured in it."""
    numbers = [*line.busy_seconds, *line.sizes, line.wall_seconds]
    return line.is_regular and all(map(is_plausible, numbers))
