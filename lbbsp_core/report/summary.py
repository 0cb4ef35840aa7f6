r"""Figures of a run: time of a step, waiting times, and the distance from the ideal.

Symbols, over the *steady* steps (the regular ones of the run's last half), for worker i of N:

===============  ==================================================================
wall             seconds from barrier to barrier, as rank 0 sees it
busy_i           busy time of worker i in between, in seconds
wait_i           wall - busy_i: waiting for slower workers, then for the all-reduce
communication    wall - max busy_i: from the last arrival to the release
===============  ==================================================================

A step is *regular* if it is full and no measurement was excluded in it. The *ideal* step is the
one of a plan with perfect foresight: the smallest possible slowest busy time for the global batch
X, at each worker's cost per sample in the same run, plus the communication of that run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lbbsp_core.allocation import allocate
from lbbsp_core.cost import Proportional
from lbbsp_core.runtime.record.record import Run, StepLine, counted

_SHORTEST = 1e-12
"""Shorter times are no measurements, and speeds computed from them could overflow."""

Floats = npt.NDArray[np.float64]
Weights = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Figures of one run; tuples are by rank.

    Args:
        workers: Number of workers, N.
        global_batch_size: Samples of a full step, X.
        step_seconds: Median wall of the steady steps.
        busy_seconds: Median busy time of each worker in them.
        waiting_share: Sum of waits / (N * sum of wall), in [0, 1).
        communication_seconds: Median time from the last arrival to the release, over *all* regular
            steps of the run.
        ideal_busy_seconds: Smallest possible slowest busy time, see `ideal_busy_seconds`.
    """

    workers: int
    global_batch_size: int
    step_seconds: float
    busy_seconds: tuple[float, ...]
    waiting_share: float
    communication_seconds: float
    ideal_busy_seconds: float

    @property
    def samples_per_second(self) -> float:
        """Throughput of all workers together, X / step."""
        return self.global_batch_size / self.step_seconds

    @property
    def ideal_step_seconds(self) -> float:
        """Time of the ideal step: ideal busy time + communication."""
        return self.ideal_busy_seconds + self.communication_seconds

    @property
    def efficiency(self) -> float:
        """Ratio of the ideal step to the achieved step."""
        return self.ideal_step_seconds / self.step_seconds

    @property
    def efficiency_without_communication(self) -> float:
        """Ratio of the ideal busy time to the achieved step: the all-reduce counts as loss."""
        return self.ideal_busy_seconds / self.step_seconds


Figures = dict[str, Any]
"""Content of ``summary.json``; see `Comparison`, `RunSummary` and `Outcome`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a training.

    Args:
        accuracy: Fraction of held-out samples that the final model classifies correctly.
        weights: Final weights, one array per variable.
    """

    accuracy: float
    weights: Sequence[Weights]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of the same training as plain BSP, and balanced."""

    bsp: RunSummary
    lbbsp: RunSummary

    @property
    def speedup(self) -> float:
        """Ratio of the BSP step to the balanced step."""
        return self.bsp.step_seconds / self.lbbsp.step_seconds

    @property
    def ideal_speedup(self) -> float:
        """Ratio of the BSP step to the ideal step of the balanced run."""
        return self.bsp.step_seconds / self.lbbsp.ideal_step_seconds

    def figures(self, bsp: Outcome, lbbsp: Outcome) -> Figures:
        """Returns all figures, as ``summary.json`` holds them."""
        difference, largest = weight_difference(bsp.weights, lbbsp.weights)
        return {
            **{
                name: {
                    "step_seconds": run.step_seconds,
                    "busy_seconds": list(run.busy_seconds),
                    "waiting_share": run.waiting_share,
                    "accuracy": outcome.accuracy,
                    "samples_per_second": run.samples_per_second,
                }
                for name, run, outcome in (("bsp", self.bsp, bsp), ("lbbsp", self.lbbsp, lbbsp))
            },
            "workers": self.lbbsp.workers,
            "global_batch_size": self.lbbsp.global_batch_size,
            "communication_seconds": self.lbbsp.communication_seconds,
            "speedup": self.speedup,
            "ideal_speedup": self.ideal_speedup,
            "efficiency": self.lbbsp.efficiency,
            "efficiency_without_communication": self.lbbsp.efficiency_without_communication,
            "max_weight_difference": difference,
            "max_abs_weight": largest,
        }


def summarise(run: Run) -> RunSummary:
    """Computes the figures of one run.

    Raises:
        ValueError: The run has no steps, or a worker was not measured in any steady step.
    """
    if not run.steps:
        raise ValueError("the run must have at least one step, got none: train for longer")
    sizes, busy, wall = _columns(run.last_half())
    _, all_busy, all_wall = _columns(counted(run.with_same_workers()))
    if not np.median(wall) > 0:
        raise ValueError("the steps of the run must have taken some time, got wall_seconds of 0")
    total = run.header.global_batch_size
    return RunSummary(
        workers=run.header.workers,
        global_batch_size=total,
        step_seconds=float(np.median(wall)),
        busy_seconds=tuple(np.median(busy, axis=0).tolist()),
        waiting_share=float((wall[:, None] - busy).sum() / (busy.shape[1] * wall.sum())),
        communication_seconds=float(np.median(all_wall - all_busy.max(axis=1))),
        ideal_busy_seconds=ideal_busy_seconds(sizes, busy, total),
    )


def ideal_busy_seconds(sizes: Floats, busy: Floats, total: int) -> float:
    r"""Computes the smallest possible slowest busy time, ``min_x max_i a_i x_i``.

    The sizes ``x_i`` are integers whose sum is X. ``a_i`` is the median of busy / size: it models a
    worker's cost as proportional to its batch, *at the operating point* of this run. One operating
    point cannot distinguish an overhead from a slope, and with an overhead the true cost curve is
    flatter. The error is bounded: apart from rounding, this ideal is the mean of the busy times
    weighted by ``1 / a_i``, and the true affine ideal is a mean of the *same* busy times with other
    weights. Both lie between the shortest and the longest busy time of the run, so they agree as
    closely as the run was balanced: take the ideal from a balanced run, not from an uneven one.

    Medians remove noise. A step waits for the slowest of N noisy workers, and that time counts
    against the run.

    Example:
        >>> ideal_busy_seconds(np.array([[5.0, 5.0]]), np.array([[0.5, 2.0]]), 10)
        0.8
    """
    costs = []
    for rank in range(sizes.shape[1]):
        is_valid = (sizes[:, rank] > 0) & (busy[:, rank] > _SHORTEST)
        if not is_valid.any():
            raise ValueError(
                f"worker {rank} must be measured in at least one steady step, got no measurement: "
                "train for more steps"
            )
        speeds = sizes[is_valid, rank] / busy[is_valid, rank]
        costs.append(Proportional(float(np.median(speeds))))
    best = allocate(costs, total=total)
    return max(cost(float(x)) for cost, x in zip(costs, best, strict=True))


def weight_difference(one: Sequence[Weights], other: Sequence[Weights]) -> tuple[float, float]:
    """Returns the largest difference of two models' weights, and the first's largest weight."""
    shapes = [[array.shape for array in arrays] for arrays in (one, other)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"both runs must train one model, got weights of shapes {shapes}")
    difference = max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
    return difference, max(float(np.abs(a).max()) for a in one)


def _columns(steps: Sequence[StepLine]) -> tuple[Floats, Floats, Floats]:
    """Returns sizes or work and busy seconds, ``(steps, workers)``; wall seconds, ``(steps,)``."""
    lines = ((each.amounts, each.busy_seconds, each.wall_seconds) for each in steps)
    sizes, busy, wall = (np.array(own, np.float64) for own in zip(*lines, strict=True))
    return sizes, busy, wall
