"""A recorded training run as a cluster: what would other schemes have made of it?"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lbbsp_core.runtime.record import read_run
from lbbsp_core.sim.cluster import MIN_STEPS, ReplayedCluster


class RecordedRun(NamedTuple):
    """What a record tells.

    Args:
        cluster: Workers as fast as they were in each step.
        communication_seconds: Median of what a step took beyond its slowest worker.
        step_seconds: Median wall time of the steps that are replayed.
    """

    cluster: ReplayedCluster
    communication_seconds: float
    step_seconds: float


def cluster_from_run(path: str | Path) -> RecordedRun:
    """Reads ``run.jsonl`` (or the folder that holds it) of a plain BSP run.

    Left out, and noted, are short steps and those with a held or missing measurement (the first
    of an epoch traces or loads): they say nothing about the workers' speeds. A plain run keeps
    its batches, so that seconds are taken as proportional to samples: where iterations have a
    large fixed part, what a policy gains is overestimated.

    Raises:
        ValueError: No record, a single worker, or hardly a step to replay.
    """
    try:
        run = read_run(path)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read as a run record: {error}: name the --run-dir of lbbsp launch"
        ) from None
    if run.pushes:
        raise ValueError(
            f"{path}: records pushes of workers that were not in step: record a plain BSP run"
        )
    good = [line for line in run.steps if _whole(line)]
    if len(good) < MIN_STEPS:
        raise ValueError(
            f"{path}: only {len(good)} of {len(run.steps)} steps are whole, at least {MIN_STEPS} "
            "are needed: record a longer run"
        )
    sizes = np.array([line["sizes"] for line in good], np.float64)
    busy = np.array([line["busy_seconds"] for line in good], np.float64)
    if sizes.shape[1] < 2:
        raise ValueError(f"{path}: a single worker has nobody to wait for: record two or more")
    walls = np.array([line["wall_seconds"] for line in good], np.float64)
    notes = []
    if left_out := len(run.steps) - len(good):
        notes.append(f"steps left out because they were held or short: {left_out}")
    if (sizes != sizes[0]).any():
        notes.append(
            "its batches change: this was no plain BSP run, and its speeds were measured at the "
            "batches that its policy gave"
        )
    cluster = ReplayedCluster(
        sizes / busy,
        (((),) * sizes.shape[1],) * len(good),
        round(statistics.median(sizes.sum(axis=1).tolist())),
        tuple(notes),
    )
    beyond = float(np.median(walls - busy.max(axis=1)))
    return RecordedRun(cluster, max(beyond, 0.0), float(np.median(walls)))


def _whole(line: dict[str, Any]) -> bool:
    """Whether a step is like others, and every worker was measured."""
    numbers = [*line["busy_seconds"], *line["sizes"], line["wall_seconds"]]
    usable = all(isinstance(n, int | float) and math.isfinite(n) and n > 0 for n in numbers)
    return usable and not line["excluded"] and not line.get("short")
