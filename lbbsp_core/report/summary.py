r"""Summary of a run: time of a step, its figures, and the distance from the ideal.

All of it is over the *measured* steps of the run (`StepTable.is_measured`): the regular ones, in
which all workers were measured. The *ideal* step is the one of a plan with perfect foresight: the
smallest possible slowest busy time for the global batch X, at each worker's cost per sample in the
same run, plus the communication of that run that is not hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lbbsp_core.allocation import allocate
from lbbsp_core.cost import Proportional, slowest
from lbbsp_core.runtime.record.figures import Figures
from lbbsp_core.runtime.record.record import Run
from lbbsp_core.runtime.record.table import Floats, StepTable, step_table

Weights = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Summary of one run; tuples are by rank.

    Args:
        workers: Number of workers, N.
        global_batch_size: Samples of a full step, X.
        step_seconds: Median time of a step, from barrier to barrier.
        samples_per_second: Throughput of all workers together: samples / time of all steps.
        busy_seconds: Median busy time of each worker.
        figures: Shares of waiting, and the estimated speed-up over even batches.
        communication_seconds: Median time from the last arrival at the barrier to the release:
            communication that is not hidden.
        ideal_busy_seconds: Smallest possible slowest busy time, see `ideal_busy_seconds`.
    """

    workers: int
    global_batch_size: int
    step_seconds: float
    samples_per_second: float
    busy_seconds: tuple[float, ...]
    figures: Figures
    communication_seconds: float
    ideal_busy_seconds: float

    @property
    def ideal_step_seconds(self) -> float:
        """Time of the ideal step: ideal busy time + communication."""
        return self.ideal_busy_seconds + self.communication_seconds

    @property
    def efficiency(self) -> float:
        """Ratio of the ideal step to the achieved step."""
        return self.ideal_step_seconds / self.step_seconds

    @property
    def ideal_busy_share(self) -> float:
        """Ratio of the ideal busy time to the achieved step: communication counts as loss, too."""
        return self.ideal_busy_seconds / self.step_seconds


Summary = dict[str, Any]
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
        """Ratio of the throughputs, balanced to BSP, as measured."""
        return self.lbbsp.samples_per_second / self.bsp.samples_per_second

    @property
    def ideal_speedup(self) -> float:
        """Ratio of the BSP step to the ideal step of the balanced run."""
        return self.bsp.step_seconds / self.lbbsp.ideal_step_seconds

    def figures(self, bsp: Outcome, lbbsp: Outcome) -> Summary:
        """Returns all figures, as ``summary.json`` holds them."""
        difference, largest = weight_difference(bsp.weights, lbbsp.weights)
        return {
            **{
                name: {
                    "step_seconds": run.step_seconds,
                    "busy_seconds": list(run.busy_seconds),
                    "waiting": run.figures.waiting,
                    "waiting_and_communication": run.figures.waiting_and_communication,
                    "hidden_communication": run.figures.hidden_communication,
                    "estimated_speedup": run.figures.speedup,
                    "estimated_speedup_at_most": run.figures.speedup_at_most,
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
            "ideal_busy_share": self.lbbsp.ideal_busy_share,
            "max_weight_difference": difference,
            "max_abs_weight": largest,
        }


def summarise(run: Run) -> RunSummary:
    """Computes the summary of one run.

    Raises:
        ValueError: The run has no steps, or none in which all workers were measured.
    """
    return summary_of(measured(step_table(run)))


def measured(table: StepTable) -> StepTable:
    """Returns the measured steps of a run."""
    measured_table = table.select(table.is_measured)
    if not len(measured_table.steps):
        raise ValueError(
            "at least one step must show the busy times of all workers, and have taken some time, "
            f"but none of {len(table.steps)} does: train for longer"
        )
    return measured_table


def summary_of(table: StepTable) -> RunSummary:
    """Computes the summary of measured steps."""
    total = table.header.global_batch_size
    return RunSummary(
        workers=table.workers,
        global_batch_size=total,
        step_seconds=table.step_seconds,
        samples_per_second=table.samples_per_second,
        busy_seconds=tuple(np.median(table.busy, axis=0).tolist()),
        figures=table.figures,
        communication_seconds=float(np.median(table.seconds - table.slowest)),
        ideal_busy_seconds=ideal_busy_seconds(table.amounts, table.busy, total),
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
    speeds = np.median(sizes / busy, axis=0).tolist()
    costs = [Proportional(speed) for speed in speeds]
    return slowest(costs, allocate(costs, total=total).tolist())


def weight_difference(one: Sequence[Weights], other: Sequence[Weights]) -> tuple[float, float]:
    """Returns the largest difference of two models' weights, and the first's largest weight."""
    shapes = [[array.shape for array in arrays] for arrays in (one, other)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"both runs must train one model, got weights of shapes {shapes}")
    difference = max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
    return difference, max(float(np.abs(a).max()) for a in one)
