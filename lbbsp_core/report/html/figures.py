"""Figures of a run whose workers are in the same step, and the verdict in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from lbbsp_core.report.summary import measured, summary_of
from lbbsp_core.report.wording import SAME, compared, percent, times
from lbbsp_core.runtime.record.events import Stop
from lbbsp_core.runtime.record.figures import Figures
from lbbsp_core.runtime.record.record import Run, StepLine
from lbbsp_core.runtime.record.table import Floats, StepTable, known_workers, step_table

BALANCED = 0.10
"""Largest share of the time for which workers of a balanced run wait for slower ones."""


@dataclass(frozen=True)
class WorkerFigures:
    """Figures of one worker over the measured steps."""

    rank: int
    host: str  # its host; empty if unknown
    device: str  # its device; empty if unknown
    batch: float  # mean batch size, in samples
    samples_per_second: float  # median of batch / busy time
    busy_share: float  # busy time / time of the steps
    waiting: float  # time that it waited for slower workers / time of the steps
    # root of the mean squared error of its predicted busy times / their mean; None without
    # predictions
    forecast_rmse: float | None
    naive_rmse: float | None  # the same if each speed had been forecast as the last one measured
    values: dict[str, float]  # what extensions have recorded in the last step, by name


@dataclass(frozen=True)
class Events:
    """Counts of what happened in a run, over all of its steps."""

    steps: int
    # full steps whose batch sizes differ from those of the full step before, with the same number
    # of workers; None where each step is cut by its work, so that they differ without a change of
    # the plan
    plan_changes: int | None
    excluded_steps: int  # steps with a measurement that was excluded from learning
    short_steps: int  # steps with fewer samples than the global batch size
    starts: int  # number of times that the run was started
    # last step of each attempt that another start followed, and of the last one if all workers
    # stopped together, with the reason if it was recorded
    stops: tuple[Stop, ...]
    # steps with which the run continued after a restart; a start that ended before its first step
    # has none
    restarts: tuple[int, ...]
    # step and new number of workers, for each change of the number
    worker_changes: tuple[tuple[int, int], ...]

    @property
    def stop_texts(self) -> list[str]:
        """Stops, each with its reason if that is known."""
        return [f"{step} ({reason})" if reason else str(step) for step, reason in self.stops]

    @property
    def change_texts(self) -> list[str]:
        """Changes of the number of workers, each with the new number."""
        return [f"{step} (to {workers} workers)" for step, workers in self.worker_changes]


@dataclass(frozen=True)
class RunReport:
    """Figures of a run over its *measured* steps, see `StepTable.is_measured`."""

    table: StepTable  # all steps since the number of workers last changed
    measured: StepTable
    figures: Figures  # of the measured steps
    # speed-up that a perfect plan would have had over the run, see `lbbsp_core.report.summary`;
    # None if it is unknown
    balanced_speedup: float | None
    workers: tuple[WorkerFigures, ...]  # figures of each worker, by rank
    events: Events

    @property
    def was_balanced(self) -> bool:
        """Whether batches were divided otherwise than by plain BSP, and not equally."""
        return not (self.table.workers == 1 or self.table.is_plain or self.table.is_even)

    @property
    def waiting(self) -> float:
        """Share of the time in which workers wait for slower ones."""
        return self.figures.waiting

    @property
    def total_seconds(self) -> float:
        """Time of all steps of the table."""
        return float(self.table.wall.sum())

    @property
    def gain(self) -> float | None:
        """Speed-up of balanced batches where workers wait for slower ones; None if it is small."""
        gain = self.balanced_speedup
        if gain is None or self.waiting <= BALANCED or gain < 1 + SAME:
            return None
        return gain

    @property
    def verdict(self) -> str:
        """One sentence that says how well the run was balanced, and what that gained."""
        idle = self.figures.waiting_and_communication
        if len(self.workers) == 1:
            return (
                f"One worker: there is nothing to balance. It was busy {percent(1 - idle)} of "
                "the time."
            )
        waited = (
            f"workers waited {percent(self.waiting)} of the time for slower ones, "
            f"{percent(idle)} including communication"
        )
        if not self.was_balanced:
            name = "plain BSP" if self.table.is_plain else "batches stayed equal"
            if self.gain is None:
                return f"{name[0].upper()}{name[1:]}: {waited}. Balancing would gain little."
            return (
                f"Not balanced, {name}: {waited}. With balanced batches a step would be up to "
                f"{times(self.gain)} as fast."
            )
        least, most = self.figures.speedup, self.figures.speedup_at_most
        word = "Partly balanced" if most > 1 + SAME else "Unbalanced"
        word = "Balanced" if self.waiting <= BALANCED else word
        beside = compared("plain BSP would have been", least, most)
        return f"{word}: {beside}, by estimate; {waited}."

    def to_json(self) -> dict[str, object]:
        """Returns the figures as the option ``--json`` writes them."""
        return {
            "verdict": self.verdict,
            **self.figures._asdict(),
            "balanced_speedup": self.balanced_speedup,
            "step_seconds": self.measured.step_seconds,
            "total_seconds": self.total_seconds,
            "samples_per_second": self.measured.samples_per_second,
            "measured_steps": len(self.measured.steps),
            "workers": [asdict(worker) for worker in self.workers],
            "events": asdict(self.events),
        }


def run_report(run: Run) -> RunReport:
    """Computes the figures of a run whose workers are in the same step."""
    table = step_table(run)
    measured_table = measured(table)
    return RunReport(
        table=table,
        measured=measured_table,
        figures=measured_table.figures,
        balanced_speedup=_balanced_speedup(measured_table),
        workers=tuple(_workers(measured_table, run.steps[-1])),
        events=_events(run, table),
    )


def relative_rmse(forecast: Floats, truth: Floats) -> float | None:
    """Returns the RMSE of forecasts divided by the mean of what they forecast; None without any."""
    mask = ~np.isnan(forecast)
    if not mask.any():
        return None
    error = forecast[mask] - truth[mask]
    with np.errstate(over="ignore"):
        return float(np.sqrt(np.mean(error**2)) / truth[mask].mean())


def _workers(table: StepTable, last: StepLine) -> Iterator[WorkerFigures]:
    total = float(table.seconds.sum())
    for rank, host, device in known_workers(table.header, table.workers):
        busy = table.busy[:, rank]
        yield WorkerFigures(
            rank,
            host,
            device,
            batch=float(table.sizes[:, rank].mean()),
            samples_per_second=float(np.median(table.sizes[:, rank] / busy)),
            busy_share=float(busy.sum()) / total,
            waiting=float((table.slowest - busy).sum()) / total,
            forecast_rmse=relative_rmse(table.predicted[:, rank], busy),
            naive_rmse=relative_rmse(_naive(table, rank), busy),
            values=last.values_of(rank),
        )


def _naive(table: StepTable, rank: int) -> Floats:
    """Returns forecasts that repeat the last speed known when a plan was made, shape ``(n,)``."""
    lag = table.header.lag or 1
    if np.isnan(table.predicted[:, rank]).all() or len(table.steps) <= lag:
        return np.full(len(table.steps), np.nan)
    amounts, busy = table.amounts[:, rank], table.busy[:, rank]
    forecast = np.full(len(busy), np.nan)
    forecast[lag:] = amounts[lag:] * busy[:-lag] / amounts[:-lag]
    return np.where(np.isnan(table.predicted[:, rank]), np.nan, forecast)


def _balanced_speedup(table: StepTable) -> float | None:
    try:
        speedup = 1 / summary_of(table).efficiency
    except (ValueError, ZeroDivisionError, OverflowError):  # such as more workers than samples
        return None
    return speedup if 0 < speedup < math.inf else None


def _events(run: Run, table: StepTable) -> Events:
    full = [line.sizes for line in run.steps if not line.short]
    changes = sum(len(a) == len(b) and a != b for a, b in pairwise(full))
    counts = pairwise([(line.step, len(line.sizes)) for line in run.steps])
    return Events(
        steps=len(run.steps),
        plan_changes=None if table.has_work else changes,
        excluded_steps=sum(bool(line.excluded) for line in run.steps),
        short_steps=sum(line.short for line in run.steps),
        starts=run.starts,
        stops=run.stops,
        restarts=run.restarts,
        worker_changes=tuple(after for before, after in counts if before[1] != after[1]),
    )
