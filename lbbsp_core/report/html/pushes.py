"""Figures of an asynchronous run, whose workers push whenever they are ready."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from lbbsp_core.report import charts
from lbbsp_core.report.charts import Chart
from lbbsp_core.report.html.advice import MIN_STEPS, SLOWER, Advice, slower
from lbbsp_core.report.html.speeds import lasting_drop
from lbbsp_core.report.wording import grouped, percent
from lbbsp_core.runtime.record.record import PushLine, Run, RunHeader
from lbbsp_core.runtime.record.table import Floats, Integers, known_workers, worker_names
from lbbsp_core.types import plausible


@dataclass(frozen=True)
class PusherFigures:
    """Figures of one worker of an asynchronous run."""

    rank: int
    host: str  # its host; empty if unknown
    device: str  # its device; empty if unknown
    pushes: int  # number of its pushes
    samples: int  # number of samples in them
    samples_per_second: float  # median of samples / busy time; 0 without a measurement
    busy_share: float  # busy time / time of the run
    mean_staleness: float  # mean number of updates by others between its read and its push
    max_staleness: int  # the largest such number


@dataclass(frozen=True)
class PushReport:
    """Figures of an asynchronous run of N workers and n pushes, since its last start.

    Each start counts pushes and time from 0, and its pushes replace those before.
    """

    header: RunHeader  # facts of the run since its last start
    push: Integers  # numbers of the pushes, shape `(n,)`
    worker: Integers  # their ranks, shape `(n,)`
    samples: Floats  # their batch sizes, shape `(n,)`
    busy: Floats  # their busy seconds, shape `(n,)`; NaN where they were not measured
    staleness: Integers  # their staleness in updates, shape `(n,)`
    total_seconds: float  # time from the last start to the last push, in seconds
    starts: int  # number of times that the run was started

    @cached_property
    def workers(self) -> tuple[PusherFigures, ...]:
        """Figures of each worker, by rank."""
        return tuple(_workers(self))

    @property
    def samples_per_second(self) -> float:
        """Samples that entered the model per second."""
        return float(self.samples.sum()) / self.total_seconds

    @property
    def verdict(self) -> str:
        """One sentence that says how busy the workers were, and how stale their gradients."""
        busy = float(np.mean([worker.busy_share for worker in self.workers]))
        return (
            f"Asynchronous run: {grouped(self.samples_per_second)} samples per second; workers "
            f"were busy {percent(min(busy, 1.0))} of the time, and their gradients were "
            f"{self.staleness.mean():.1f} updates old on average, at most {self.staleness.max()}."
        )

    def to_json(self) -> dict[str, object]:
        """Returns the figures as the option ``--json`` writes them."""
        return {
            "verdict": self.verdict,
            "pushes": len(self.push),
            "starts": self.starts,
            "total_seconds": self.total_seconds,
            "samples_per_second": self.samples_per_second,
            "mean_staleness": float(self.staleness.mean()),
            "max_staleness": int(self.staleness.max()),
            "workers": [asdict(worker) for worker in self.workers],
        }


def push_report(run: Run) -> PushReport:
    """Computes the figures of an asynchronous run."""
    lines = run.pushes
    for line in lines:
        _check(line, run.header.workers)
    busy = np.array([line.busy_seconds for line in lines])
    report = PushReport(
        header=run.header,
        push=np.array([line.push for line in lines], np.int64),
        worker=np.array([line.worker for line in lines], np.int64),
        samples=np.array([line.samples for line in lines], np.float64),
        busy=np.where(plausible(busy), busy, np.nan),
        staleness=np.array([line.staleness for line in lines], np.int64),
        total_seconds=float(max(line.seconds for line in lines)),
        starts=run.starts,
    )
    if not report.total_seconds > 0:
        raise ValueError("the pushes of the run must have taken some time, got 0 seconds")
    return report


def advise_pushes(report: PushReport) -> list[Advice]:
    """Applies the rules for asynchronous runs."""
    if len(report.push) < MIN_STEPS:
        text = f"Only {len(report.push)} pushes were recorded: the figures are uncertain."
        return [Advice("few-steps", text + " Train for longer before you draw conclusions.")]
    return [*_slower(report), *_stale(report)]


def _check(line: PushLine, workers: int) -> None:
    numbers = dict.fromkeys(("samples", "busy_seconds", "seconds", "staleness"), 1e15)
    for name, largest in {"worker": workers - 1, **numbers}.items():
        value = getattr(line, name)
        if not 0 <= value <= largest:
            raise ValueError(
                f"push {line.push}: {name} must be between 0 and {largest:g}, got {value!r}: "
                "record the run again"
            )


def _workers(report: PushReport) -> Iterator[PusherFigures]:
    for rank, host, device in known_workers(report.header, report.header.workers):
        mask = report.worker == rank
        busy, samples = report.busy[mask], report.samples[mask]
        speeds = (samples / busy)[~np.isnan(busy)]
        staleness = report.staleness[mask] if mask.any() else np.zeros(1)
        yield PusherFigures(
            rank,
            host,
            device,
            pushes=int(mask.sum()),
            samples=int(samples.sum()),
            samples_per_second=float(np.median(speeds)) if speeds.size else 0.0,
            busy_share=float(np.nansum(busy)) / report.total_seconds,
            mean_staleness=float(staleness.mean()),
            max_staleness=int(staleness.max()),
        )


def _slower(report: PushReport) -> Iterator[Advice]:
    for rank, name in enumerate(worker_names(report.header, len(report.workers))):
        indices = np.flatnonzero((report.worker == rank) & (report.busy > 0) & (report.samples > 0))
        drop = lasting_drop(report.samples[indices] / report.busy[indices], SLOWER)
        if drop is not None:
            yield slower(rank, name, drop, f"push {report.push[indices[drop.start]]}")


def _stale(report: PushReport) -> Iterator[Advice]:
    worst = max(report.workers, key=lambda worker: worker.mean_staleness)
    usual = len(report.workers) - 1
    if worst.mean_staleness > 2 * max(usual, 1):
        name = worker_names(report.header, len(report.workers))[worst.rank]
        yield Advice(
            "stale-gradients",
            f"Gradients of {name} are {worst.mean_staleness:.1f} updates old on average, where "
            f"equally fast workers would have {usual}. Balance the batches (policy=LoadBalanced()),"
            " or bound the lead with sync=SSP(3).",
            (worst.rank,),
        )


def push_charts(report: PushReport) -> Iterator[Chart]:
    """Yields the charts of an asynchronous run."""
    ranks = [worker.rank for worker in report.workers]
    names = list(map(charts.short_name, ranks))
    busy = 100 * np.minimum([worker.busy_share for worker in report.workers], 1.0)
    parts = (("busy", busy, charts.BUSY), ("other", 100 - busy, charts.COMMUNICATION))
    bars = [charts.bar(names, values, label, colour) for label, values, colour in parts]
    caption = "Share of the time for which each worker was busy with an iteration; the rest is "
    caption += "waiting, input and communication."
    yield Chart("shares", "Where the time goes", caption, bars, charts.bar_layout(len(ranks)))
    for name, title, values, unit in (
        ("batches", "Batch sizes", report.samples, "samples"),
        ("speeds", "Speeds", report.samples / report.busy, "samples/s"),
        ("staleness", "Staleness", report.staleness.astype(np.float64), "updates by others"),
    ):
        curves: list[charts.Trace] = []
        for rank in ranks:
            mask = report.worker == rank
            curves += charts.lines(
                report.push[mask], values[mask][:, None], [names[rank]], first=rank, of=len(ranks)
            )
        rows = charts.spread_table("worker", {str(r): values[report.worker == r] for r in ranks})
        caption = f"{title} of each worker's pushes, in {unit}."
        yield Chart(name, title, caption, curves, charts.axes("push", unit), rows)
