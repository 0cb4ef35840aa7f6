"""Figures of a run whose workers are in the same step, and the verdict in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from lbbsp_core.report.html.plain import PlainEstimate, plain_estimate
from lbbsp_core.report.html.table import Floats, StepTable, known_workers, step_table
from lbbsp_core.report.page import percent, times
from lbbsp_core.report.summary import summarise
from lbbsp_core.runtime.record.record import Run, Stop

BALANCED = 0.10
"""Largest share of the time for which workers of a balanced run wait for slower ones."""

_SAME = 0.03
"""Speed-ups this close to 1 count as none."""


@dataclass(frozen=True)
class WorkerFigures:
    """Figures of one worker over the measured steps."""

    rank: int
    host: str  # its host; empty if unknown
    device: str  # its device; empty if unknown
    batch: float  # mean batch size, in samples
    samples_per_second: float  # median of batch / busy time
    busy_share: float  # busy time / time of the steps
    waiting_share: float  # time that it waited for slower workers / time of the steps
    # root of the mean squared error of its predicted busy times / their mean; None without
    # predictions
    forecast_rmse: float | None
    naive_rmse: float | None  # the same if each speed had been forecast as the last one measured


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
    # estimate of plain BSP; None if the record is one of plain BSP or of one worker, or if its
    # batches stayed equal
    plain: PlainEstimate | None
    step_seconds: float  # median time of a step
    total_seconds: float  # time of all steps of the table
    waiting_share: float  # waits for slower workers and for the communication / (N * time)
    communication_share: float  # time from the last arrival to the next step / time
    # speed-up that a perfect plan would have had over the steady steps of the run, see
    # `lbbsp_core.report.summary`; None if it is unknown
    balanced_speedup: float | None
    workers: tuple[WorkerFigures, ...]  # figures of each worker, by rank
    events: Events

    @property
    def imbalance(self) -> float:
        """Share of the time for which workers wait for slower ones, without communication."""
        return max(self.waiting_share - self.communication_share, 0.0)

    @property
    def gain(self) -> float | None:
        """Speed-up of balanced batches where workers wait for slower ones; None if it is small."""
        gain = self.balanced_speedup
        if gain is None or self.imbalance <= BALANCED or gain < 1 + _SAME:
            return None
        return gain

    @property
    def samples_per_second(self) -> float:
        """Samples of the measured steps per second."""
        return float(self.measured.sizes.sum() / self.measured.wall.sum())

    @property
    def verdict(self) -> str:
        """One sentence that says how well the run was balanced, and what that gained."""
        if len(self.workers) == 1:
            return (
                "One worker: there is nothing to balance. It was busy "
                f"{percent(1 - self.waiting_share)} of the time."
            )
        waited = f"workers waited {percent(self.waiting_share)} of the time"
        if self.waiting_share > BALANCED and 2 * self.communication_share > self.waiting_share:
            waited += ", mostly for the communication"
        if self.plain is None:
            name = "plain BSP" if self.table.is_plain else "batches stayed equal"
            if self.gain is None:
                return f"{name[0].upper()}{name[1:]}: {waited}, and balancing would gain little."
            return (
                f"Not balanced, {name}: {waited}. With balanced batches a step would be up to "
                f"{times(self.gain)} times as fast."
            )
        speedup = self.plain.speedup
        word = "Partly balanced" if speedup > 1 + _SAME else "Unbalanced"
        word = "Balanced" if self.imbalance <= BALANCED else word
        compared, rest = f"{times(speedup)} times as fast as", ""
        if abs(speedup - 1) <= _SAME:
            compared = "about as fast as"
        elif speedup < 1:
            compared, rest = "slower than", f" ({times(speedup)} times as fast)"
        return f"{word}: {compared} plain BSP would have been{rest}; {waited}."

    def figures(self) -> dict[str, object]:
        """Returns the figures as the option ``--json`` writes them."""
        plain = self.plain
        return {
            "verdict": self.verdict,
            "speedup": None if plain is None else plain.speedup,
            "speedup_range": None if plain is None else [plain.low, plain.high],
            "balanced_speedup": self.balanced_speedup,
            "step_seconds": self.step_seconds,
            "total_seconds": self.total_seconds,
            "samples_per_second": self.samples_per_second,
            "waiting_share": self.waiting_share,
            "communication_share": self.communication_share,
            "measured_steps": len(self.measured.steps),
            "workers": [asdict(worker) for worker in self.workers],
            "events": asdict(self.events),
        }


def run_report(run: Run) -> RunReport:
    """Computes the figures of a run whose workers are in the same step."""
    table = step_table(run)
    measured = table.select(table.is_measured)
    if not len(measured.steps):
        raise ValueError(
            "at least one step must show the busy times of all workers, and have taken some time, "
            f"but none of {len(table.steps)} does: train for longer"
        )
    slowest = measured.busy.max(axis=1)
    communication = np.maximum(measured.wall - slowest, 0.0)
    waits = (slowest + communication)[:, None] - measured.busy
    total = float((slowest + communication).sum())
    compares = table.workers > 1 and not (table.is_plain or table.is_even)
    return RunReport(
        table=table,
        measured=measured,
        plain=plain_estimate(measured) if compares else None,
        step_seconds=float(np.median(measured.wall)),
        total_seconds=float(table.wall.sum()),
        waiting_share=float(waits.sum()) / (table.workers * total),
        communication_share=float(communication.sum()) / total,
        balanced_speedup=_balanced_speedup(run),
        workers=tuple(_workers(measured, total)),
        events=_events(run, table),
    )


def relative_rmse(forecast: Floats, truth: Floats) -> float | None:
    """Returns the RMSE of forecasts divided by the mean of what they forecast; None without any."""
    known = ~np.isnan(forecast)
    if not known.any():
        return None
    error = forecast[known] - truth[known]
    with np.errstate(over="ignore"):
        return float(np.sqrt(np.mean(error**2)) / truth[known].mean())


def _workers(table: StepTable, total: float) -> Iterator[WorkerFigures]:
    slowest = table.busy.max(axis=1)
    for rank, host, device in known_workers(table.header, table.workers):
        busy = table.busy[:, rank]
        yield WorkerFigures(
            rank,
            host,
            device,
            batch=float(table.sizes[:, rank].mean()),
            samples_per_second=float(np.median(table.sizes[:, rank] / busy)),
            busy_share=float(busy.sum()) / total,
            waiting_share=float((slowest - busy).sum()) / total,
            forecast_rmse=relative_rmse(table.predicted[:, rank], busy),
            naive_rmse=relative_rmse(_naive(table, rank), busy),
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


def _balanced_speedup(run: Run) -> float | None:
    try:
        speedup = 1 / summarise(run).efficiency
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
