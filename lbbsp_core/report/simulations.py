"""Pictures of simulated runs: efficiencies; timelines, updates and scaling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

import numpy as np

from lbbsp_core.report import charts
from lbbsp_core.report.charts import Chart, Floats
from lbbsp_core.report.page import Content, write_page
from lbbsp_core.sim import AsyncRun, Timeline
from lbbsp_core.sim.experiment import Result, Row

ITERATIONS, WORKERS = 12, 8
"""Numbers of iterations and workers that a timeline shows."""

_MOST_SPANS = 40 * ITERATIONS


def draw_efficiencies(rows: Sequence[Row], path: Path) -> None:
    """Draws a bar for each run, in a chart for each trace; the oracle has efficiency 1."""
    drawn = []
    for number, (title, group) in enumerate(groupby(rows, key=_title)):
        own = list(group)
        values = np.array([row.efficiency for row in own])
        names = [escape(row.title, quote=False) for row in own]
        texts = [f"{value:.3f}" for value in values]
        bars = charts.bar(
            names, values, "efficiency", charts.BUSY, "", text=texts, showlegend=False
        )
        layout = charts.bar_layout(len(own), range=[0, 1.1 * max(1.0, values.max())])
        caption = "Time of the oracle / time of each run."
        drawn.append(Chart(f"trace-{number}", title, caption, [bars], layout, wide=True))
    write_page(Content("simulate", "lbbsp simulate", "Efficiencies", drawn), path)


def draw_simulation(results: Sequence[Result], path: Path) -> None:
    """Draws timelines and updates, and scaling if numbers of workers differ."""
    drawn = [*timelines(results), *updates(results)]
    if len({result.row.workers for result in results}) > 1:
        drawn.append(_scaling([result.row for result in results]))
    write_page(Content("simulate", "lbbsp simulate", "Runs in virtual time", drawn), path)


def worker_spans(
    run: Timeline | AsyncRun, iterations: int = ITERATIONS
) -> Iterator[tuple[int, Floats, Floats, Floats]]:
    """Yields the rank, start, push and release times of the first iterations of some workers."""
    if isinstance(run, AsyncRun):
        schedule = run.schedule
        for rank in range(min(WORKERS, run.workers)):
            own = np.flatnonzero(schedule.worker == rank)[:iterations]
            push, release = schedule.push[own], schedule.release[own]
            yield rank, schedule.start[own], push, np.where(np.isfinite(release), release, push)
        return
    ends = np.cumsum(run.wall_seconds[:iterations])
    starts = np.concatenate([[0.0], ends[:-1]])
    for rank in range(min(WORKERS, run.sizes.shape[1])):
        yield rank, starts, starts + run.push_seconds[:iterations, rank], ends


def update_times(run: Timeline | AsyncRun) -> Floats:
    """Returns the times at which updates enter the model, ascending."""
    if isinstance(run, Timeline):
        return np.cumsum(run.wall_seconds)
    entered = run.schedule.update >= 0
    times = np.zeros(run.schedule.updates)
    np.maximum.at(times, run.schedule.update[entered], run.schedule.push[entered])
    return times


def timelines(results: Sequence[Result]) -> Iterator[Chart]:
    """Yields all runs over the same time, in which the fastest one ends its first iterations."""
    until = min(_end(worker_spans(result.run)) for result in results)
    for number, result in enumerate(results):
        rows = [np.broadcast_arrays(*own) for own in worker_spans(result.run, _MOST_SPANS)]
        rank, start, push, release = np.concatenate(rows, axis=1)
        shown = start < until
        y = [charts.short_name(int(each)) for each in rank[shown]]
        marks = (
            ("busy", charts.BUSY, start[shown], push[shown]),
            ("waiting, communication", charts.WAITING, push[shown], release[shown]),
        )
        traces = charts.timeline(y, marks, "s")
        layout = charts.bar_layout(len(rows), title={"text": "virtual seconds"}, range=[0, until])
        layout["barmode"] = "overlay"
        first = f" The first {len(rows)} workers." * (len(rows) < result.row.workers)
        caption = f"{_title(result.row)}: when workers are busy, and when they wait.{first}"
        title = f"Timeline: {result.row.title}"
        yield Chart(f"timeline-{number}", title, caption, traces, layout, wide=True)


def _end(shown: Iterator[tuple[int, Floats, Floats, Floats]]) -> float:
    """Returns the last release; a worker that was preempted at once has none."""
    return max((float(release.max()) for *_, release in shown if release.size), default=1.0)


def updates(results: Sequence[Result]) -> Iterator[Chart]:
    """Yields the mean seconds between updates, over consecutive windows."""

    def windows(result: Result) -> tuple[Floats, Floats]:
        times = update_times(result.run)
        per = max(1, len(times) // 40)
        marks = np.concatenate([[0.0], times[per - 1 :: per]])
        return marks[1:], np.diff(marks) / per

    for number, (title, own) in enumerate(groupby(results, key=lambda result: _title(result.row))):
        curves = [(result.row.title, *windows(result)) for result in own]
        yield _chart(f"updates-{number}", f"Updates: {title}", "seconds per update", curves)


def _scaling(rows: Sequence[Row]) -> Chart:
    """Returns efficiency by number of workers, a line for each scheme of each scenario."""

    def scheme(row: Row) -> str:
        return f"{row.name}: {row.title}"

    curves = []
    for name, own in groupby(sorted(rows, key=scheme), key=scheme):
        points = sorted((row.workers, row.efficiency) for row in own)
        curves.append((name, *np.array(points, np.float64).T))
    chart = _chart("scaling", "Scaling", "efficiency", curves, "workers")
    sizes = sorted({row.workers for row in rows})
    chart.layout["xaxis"] |= {"type": "log", "tickvals": sizes, "ticktext": list(map(str, sizes))}
    return chart


def _chart(
    name: str,
    title: str,
    y: str,
    curves: Iterable[tuple[str, Floats, Floats]],
    x: str = "virtual seconds",
) -> Chart:
    traces = [
        charts.curve(across, up, label, mode="lines+markers", **charts.line_style(number))
        for number, (label, across, up) in enumerate(curves)
    ]
    return Chart(name, title, f"{y}, by {x}.".capitalize(), traces, charts.axes(x, y), wide=True)


def _title(row: Row) -> str:
    return f"{row.name}, {row.workers} workers"
