"""Clusters in virtual time: costs and driving factors of every worker's iterations."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from lbbsp_core.cost import AffineArray, Cost, Proportional
from lbbsp_core.sim.traces import Trace, TraceError
from lbbsp_core.types import Floats, Ints

MIN_STEPS = 5
"""Number of steps below which a trace is not replayed."""


@runtime_checkable
class SimulatedCluster(Protocol):
    """Cost of every worker's iterations, independent of clocks, barriers and plans.

    The cost of a worker's k-th iteration does not depend on the time at which it starts, so that
    all policies and synchronisers are compared under the same slowdowns.
    """

    @property
    def workers(self) -> int:
        """Number of workers, N."""
        ...

    @property
    def steps(self) -> int:
        """Number of iterations of each worker."""
        ...

    def cost(self, rank: int, step: int) -> Cost:
        """Returns the true cost of worker `rank` in its iteration `step`."""
        ...

    def costs(self, step: int) -> Sequence[Cost]:
        """Returns the true cost of every worker in one step."""
        return [self.cost(rank, step) for rank in range(self.workers)]

    def seconds(self, step: int, sizes: Ints | Floats) -> Floats:
        """Returns the busy seconds of every worker in one step, shape ``(workers,)``."""
        costs = self.costs(step)
        if isinstance(costs, AffineArray):
            return costs.seconds(sizes)
        return np.array([cost(x) for cost, x in zip(costs, sizes.tolist(), strict=True)])

    def drivers(self, rank: int, step: int) -> tuple[float, ...]:
        """Returns the driving factors that worker `rank` knows before its iteration `step`."""
        return ()


@dataclass(frozen=True)
class ReplayedCluster(SimulatedCluster):
    """Cluster with recorded speeds: x samples in step k take ``x / v_k`` seconds.

    This assumes that busy seconds are proportional to samples, since a trace does not show which
    part of them is overhead.

    Args:
        speeds: Samples per second v, shape ``(steps, workers)``.
        known: Driving factors known before each step, by step and rank.
        global_batch_size: X of the recording: the median of the samples per step.
        notes: Remarks on steps that were left out.

    Example:
        >>> cluster = ReplayedCluster(np.array([[4.0, 2.0]]), (((), ()),), 12)
        >>> cluster.cost(0, 0)(8), cluster.cost(1, 0)(4)
        (2.0, 2.0)
    """

    speeds: Floats
    known: tuple[tuple[tuple[float, ...], ...], ...]
    global_batch_size: int
    notes: tuple[str, ...] = ()

    @property
    def workers(self) -> int:
        """Number of workers, N."""
        return int(self.speeds.shape[1])

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return int(self.speeds.shape[0])

    def cost(self, rank: int, step: int) -> Proportional:
        """Returns ``x / v`` with the speed of worker `rank` in `step`."""
        return Proportional(float(self.speeds[step, rank]))

    def costs(self, step: int) -> AffineArray:
        """Returns ``x / v`` for every worker in one step."""
        return AffineArray(np.zeros(self.workers), 1.0 / self.speeds[step])

    def seconds(self, step: int, sizes: Ints | Floats) -> Floats:
        """Returns the busy seconds ``x / v`` of every worker in one step."""
        seconds: Floats = sizes / self.speeds[step]
        return seconds

    def drivers(self, rank: int, step: int) -> tuple[float, ...]:
        """Returns the recorded driving factors."""
        return self.known[step][rank]


def replay_trace(trace: Trace, workers: int | None = None) -> ReplayedCluster:
    """Returns the cluster on which a trace of several workers was recorded.

    Ranks are in the order of the trace's worker numbers. Steps are aligned by their number; a
    step that is missing for one of the workers is left out, and noted.

    Args:
        trace: Trace from `lbbsp_core.sim.read_trace`.
        workers: Number of workers to keep, the first ones; None: all.

    Raises:
        TraceError: The trace has a single worker, fewer workers than requested, or too few steps
            that all workers have in common.
    """
    if workers is not None:
        if workers > len(trace.series):
            raise TraceError(
                f"{trace.path}: {workers} workers are requested, but the trace has "
                f"{len(trace.series)}: lower workers, record more, or simulate synthetic workers "
                "with a scenario"
            )
        trace = replace(trace, series=trace.series[:workers])
    if len(trace.series) < 2:
        raise TraceError(
            f"{trace.path}: a single worker (number {trace.series[0].worker}) has no other "
            "worker to wait for: record at least two workers, with rows for the same steps"
        )
    by_step = [
        dict(zip(series.steps.tolist(), series.measurements, strict=True))
        for series in trace.series
    ]
    recorded = sorted(set.union(*map(set, by_step)))
    common = [step for step in recorded if all(step in measurements for measurements in by_step)]
    if len(common) < MIN_STEPS:
        raise TraceError(
            f"{trace.path}: the {len(by_step)} workers have only {len(common)} of "
            f"{len(recorded)} steps in common, at least {MIN_STEPS} are needed: record more, or "
            "remove workers that lack most of them"
        )
    rows = [[measurements[step] for measurements in by_step] for step in common]
    left_out = len(recorded) - len(common)
    return ReplayedCluster(
        np.array([[float(m.samples_per_second) for m in row] for row in rows]),
        tuple(tuple(m.drivers for m in row) for row in rows),
        round(statistics.median(sum(float(m.samples) for m in row) for row in rows)),
        (f"steps left out because not every worker has them: {left_out}",) if left_out else (),
    )
