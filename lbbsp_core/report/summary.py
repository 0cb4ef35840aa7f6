r"""A run in figures: how long a step takes, who waits, and how far that is from the ideal.

Symbols, over the *steady* steps (the full, unheld ones of the run's last half), for worker i of N:

===============  ==================================================================
wall             seconds from barrier to barrier, as rank 0 sees it
busy_i           seconds worker i was alone in between
wait_i           wall - busy_i: for slower workers, then for the all-reduce itself
communication    wall - max busy_i: from the last arrival to the release
===============  ==================================================================

The *ideal* step is what perfect foresight would have made of the same run: the smallest possible
slowest busy time for the whole batch X, under what a sample cost each worker in that run, plus
the communication that the run had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lbbsp_core.allocation import allocate
from lbbsp_core.cost import Proportional
from lbbsp_core.runtime.record import Run, StepLine

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run in figures; lists are by rank.

    Args:
        workers: N.
        global_batch_size: X, in samples.
        step_seconds: Median wall of the steady steps.
        busy_seconds: Median busy time of each worker in them.
        waiting_share: Sum of waits / (N * sum of wall), in [0, 1).
        communication_seconds: Median, over *all* full and unheld steps of the run, of the time
            from the last arrival to the release.
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
        """X / step: the throughput of all workers together."""
        return self.global_batch_size / self.step_seconds

    @property
    def ideal_step_seconds(self) -> float:
        """Ideal busy time + communication."""
        return self.ideal_busy_seconds + self.communication_seconds

    @property
    def efficiency(self) -> float:
        """Ideal step / achieved step."""
        return self.ideal_step_seconds / self.step_seconds

    @property
    def efficiency_without_communication(self) -> float:
        """Ideal busy time / achieved step: the all-reduce counts as loss."""
        return self.ideal_busy_seconds / self.step_seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has learned.

    Args:
        accuracy: Share of held-out samples that the final model reads rightly.
        weights: Its final weights, one array each.
    """

    accuracy: float
    weights: Sequence[npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same training twice: as plain BSP, and balanced."""

    bsp: RunSummary
    lbbsp: RunSummary

    @property
    def speedup(self) -> float:
        """BSP step / balanced step."""
        return self.bsp.step_seconds / self.lbbsp.step_seconds

    @property
    def ideal_speedup(self) -> float:
        """BSP step / ideal step of the balanced run."""
        return self.bsp.step_seconds / self.lbbsp.ideal_step_seconds

    def figures(self, bsp: Outcome, lbbsp: Outcome) -> dict[str, Any]:
        """All figures, as ``summary.json`` holds them."""
        difference, largest = weight_difference(bsp.weights, lbbsp.weights)
        return {
            "bsp": _figures(self.bsp, bsp),
            "lbbsp": _figures(self.lbbsp, lbbsp),
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
        ValueError: The run has no steps, or a worker in it was never measured.
    """
    if not run.steps:
        raise ValueError("the run must hold at least one step, got none: let it train longer")
    steady = run.last_half()
    sizes, busy, wall = _columns(steady)
    total = run.header.global_batch_size
    return RunSummary(
        workers=run.header.workers,
        global_batch_size=total,
        step_seconds=float(np.median(wall)),
        busy_seconds=tuple(np.median(busy, axis=0).tolist()),
        waiting_share=float((wall[:, None] - busy).sum() / (busy.shape[1] * wall.sum())),
        communication_seconds=_communication(run),
        ideal_busy_seconds=ideal_busy_seconds(sizes, busy, total),
    )


def ideal_busy_seconds(sizes: Floats, busy: Floats, total: int) -> float:
    r"""The smallest possible slowest busy time for the whole batch, ``min_x max_i a_i x_i``.

    ``a_i`` is the median of busy / size: a worker's cost as proportional to its batch, *at the
    operating point* of this run. One operating point cannot tell an overhead from a slope, and
    where there is an overhead the true curve is flatter than ours. What that can do is bounded:
    but for whole numbers, our ideal is the mean of the busy times weighted by ``1 / a_i`` (all
    would share it), and the true affine ideal a mean of the *same* busy times with other weights.
    Both lie between the shortest and the longest busy time of the run, so they agree as closely
    as the run was balanced: take the ideal from a balanced run, never from an uneven one.

    Medians know no noise. A step waits for the slowest of N noisy workers, and what that costs
    counts against the run.

    Args:
        sizes: Samples, shape ``(steps, workers)``.
        busy: Seconds, shape ``(steps, workers)``.
        total: X, in samples.

    Raises:
        ValueError: A worker without a usable measurement.

    Example:
        >>> ideal_busy_seconds(np.array([[5.0, 5.0]]), np.array([[0.5, 2.0]]), 10)
        0.8
    """
    costs = []
    for rank in range(sizes.shape[1]):
        usable = (sizes[:, rank] > 0) & (busy[:, rank] > 0)
        if not usable.any():
            raise ValueError(
                f"worker {rank} must be measured in one steady step at least, and never was: let "
                "the run train for more steps"
            )
        speeds = sizes[usable, rank] / busy[usable, rank]
        costs.append(Proportional(float(np.median(speeds))))
    best = allocate(costs, total=total)
    return max(cost(float(x)) for cost, x in zip(costs, best, strict=True))


def weight_difference(
    one: Sequence[npt.NDArray[Any]], other: Sequence[npt.NDArray[Any]]
) -> tuple[float, float]:
    """The largest difference between two models' weights, and the largest weight of the first.

    Raises:
        ValueError: The models do not have the same shapes.
    """
    shapes = [[array.shape for array in arrays] for arrays in (one, other)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"both runs must train one model, got weights of shapes {shapes}")
    difference = max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
    return difference, max(float(np.abs(a).max()) for a in one)


def _columns(steps: Sequence[StepLine]) -> tuple[Floats, Floats, Floats]:
    """Sizes and busy seconds, both ``(steps, workers)``, and wall seconds ``(steps,)``."""
    sizes = np.array([line.sizes for line in steps], np.float64)
    busy = np.array([line.busy_seconds for line in steps], np.float64)
    return sizes, busy, np.array([line.wall_seconds for line in steps], np.float64)


def _communication(run: Run) -> float:
    regular = [line for line in run.steps if line.is_regular]
    _, busy, wall = _columns(regular or run.steps)
    return float(np.median(wall - busy.max(axis=1)))


def _figures(summary: RunSummary, outcome: Outcome) -> dict[str, Any]:
    return {
        "step_seconds": summary.step_seconds,
        "busy_seconds": list(summary.busy_seconds),
        "waiting_share": summary.waiting_share,
        "accuracy": outcome.accuracy,
        "samples_per_second": summary.samples_per_second,
    }
