"""Clusters in virtual time: how long a worker takes, and what it knows beforehand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lbbsp_core.cost import AffineArray, Cost, Proportional
from lbbsp_core.sim.traces import Trace, TraceError

Array = npt.NDArray[np.float64]

LEAST_STEPS = 5
"""Shorter traces cannot be replayed."""


@runtime_checkable
class SimulatedCluster(Protocol):
    """What a simulation asks of a cluster, worker by worker: no clock, no barrier, no plan.

    A worker's k-th iteration takes as long whenever it begins, so that several policies, or ways
    to synchronise, meet the same weather.
    """

    @property
    def workers(self) -> int:
        """N."""
        ...

    @property
    def steps(self) -> int:
        """Iterations of each worker."""
        ...

    def cost(self, rank: int, step: int) -> Cost:
        """The true curve of worker `rank` in its iteration `step`: samples to busy seconds."""
        ...

    def costs(self, step: int) -> Sequence[Cost]:
        """`cost` of every worker in one step."""
        ...

    def seconds(self, step: int, sizes: npt.NDArray[np.int64]) -> Array:
        """Busy seconds of every worker in one step, ``cost(rank, step)(sizes[rank])``."""
        ...

    def drivers(self, rank: int, step: int) -> tuple[float, ...]:
        """Driving factors it knows before that iteration."""
        ...


@dataclass(frozen=True)
class ReplayedCluster:
    """Workers as fast as they were in a trace: x samples in step k take ``x / v_k`` seconds.

    That is right as far as recorded seconds are proportional to recorded samples, since a trace
    has no overhead of its own.

    Args:
        speeds: v, samples per second, shape ``(steps, workers)``.
        known: Drivers before each step, by step and rank.
        global_batch_size: X of the recording: the median of what a step processed.
        notes: What was left out of the trace, in words.

    Example:
        >>> cluster = ReplayedCluster(np.array([[4.0, 2.0]]), (((), ()),), 12)
        >>> cluster.cost(0, 0)(8), cluster.cost(1, 0)(4)
        (2.0, 2.0)
    """

    speeds: Array
    known: tuple[tuple[tuple[float, ...], ...], ...]
    global_batch_size: int
    notes: tuple[str, ...] = ()

    @property
    def workers(self) -> int:
        """N."""
        return int(self.speeds.shape[1])

    @property
    def steps(self) -> int:
        """Of the trace."""
        return int(self.speeds.shape[0])

    def cost(self, rank: int, step: int) -> Proportional:
        """``x / v``."""
        return Proportional(float(self.speeds[step, rank]))

    def costs(self, step: int) -> AffineArray:
        """The lines of a step."""
        return AffineArray(np.zeros(self.workers), 1.0 / self.speeds[step])

    def seconds(self, step: int, sizes: npt.NDArray[np.int64]) -> Array:
        """``x / v``."""
        seconds: Array = sizes / self.speeds[step]
        return seconds

    def drivers(self, rank: int, step: int) -> tuple[float, ...]:
        """As recorded."""
        return self.known[step][rank]


def replay_trace(trace: Trace, workers: int | None = None) -> ReplayedCluster:
    """The cluster that a trace of several workers was recorded on; rank = order of its numbers.

    Steps are aligned by their number: one that some worker lacks is left out, and noted.

    Args:
        trace: From `lbbsp_core.sim.read_trace`.
        workers: How many of them, the first ones; None: all.

    Raises:
        TraceError: One worker only, fewer than asked for, or hardly a step that every worker has.
    """
    if workers is not None:
        trace = _first(trace, workers)
    if len(trace.series) < 2:
        raise TraceError(
            f"{trace.path}: a single worker (number {trace.series[0].worker}) has nobody to wait "
            "for: record at least two workers, with rows for the same steps"
        )
    by_step = [
        dict(zip(series.steps.tolist(), series.measurements, strict=True))
        for series in trace.series
    ]
    every = sorted(set.union(*map(set, by_step)))
    common = [step for step in every if all(step in own for own in by_step)]
    if len(common) < LEAST_STEPS:
        raise TraceError(
            f"{trace.path}: every one of the {len(by_step)} workers has only {len(common)} of "
            f"{len(every)} steps, at least {LEAST_STEPS} are needed: record more, or remove "
            "workers that lack most of them"
        )
    rows = [[own[step] for own in by_step] for step in common]
    left_out = len(every) - len(common)
    return ReplayedCluster(
        np.array([[float(one.samples_per_second) for one in row] for row in rows]),
        tuple(tuple(one.drivers for one in row) for row in rows),
        round(statistics.median(sum(float(one.samples) for one in row) for row in rows)),
        (f"steps left out because not every worker has them: {left_out}",) if left_out else (),
    )


def _first(trace: Trace, workers: int) -> Trace:
    if workers > len(trace.series):
        raise TraceError(
            f"{trace.path}: {workers} workers are asked for, but it holds {len(trace.series)}: "
            "lower workers, record more, or invent them with a scenario"
        )
    return replace(trace, series=trace.series[:workers])
