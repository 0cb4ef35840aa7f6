"""Pictures of simulated runs: efficiencies; total times, updates and scaling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lbbsp_core.report import charts
from lbbsp_core.report.charts import Chart, Floats
from lbbsp_core.report.page import Content, write_page
from lbbsp_core.report.wording import grouped, percent
from lbbsp_core.sim import AsyncRun, Timeline
from lbbsp_core.sim.experiment import Result, Row

_WINDOWS = 20  # of which a curve of updates shows the means


def draw_efficiencies(rows: Sequence[Row], path: Path) -> None:
    """Draws a bar for each run, in a chart for each trace; the oracle has efficiency 1."""
    drawn = []
    for number, (title, group) in enumerate(groupby(rows, key=_title)):
        runs = list(group)
        values = np.array([row.efficiency for row in runs])
        bars = _bars(runs, values, "efficiency", "", text=[f"{value:.3f}" for value in values])
        layout = charts.bar_layout(len(runs), range=[0, 1.1 * max(1.0, values.max())])
        caption = "Time of the oracle / time of each run."
        drawn.append(Chart(f"trace-{number}", title, caption, [bars], layout, wide=True))
    write_page(Content("simulate", "lbbsp simulate", "Efficiencies", drawn), path)


def draw_simulation(results: Sequence[Result], path: Path) -> None:
    """Draws total times and updates, and scaling if numbers of workers differ."""
    rows = [result.row for result in results]
    drawn = [*_totals(rows), *_updates(results)]
    if len({row.workers for row in rows}) > 1:
        drawn.append(_scaling(rows))
    write_page(Content("simulate", "lbbsp simulate", "Runs in virtual time", drawn), path)


def update_times(run: Timeline | AsyncRun) -> Floats:
    """Returns the times at which updates enter the model, ascending."""
    if isinstance(run, Timeline):
        return np.cumsum(run.wall_seconds)
    entered = run.schedule.update >= 0
    times = np.zeros(run.schedule.updates)
    np.maximum.at(times, run.schedule.update[entered], run.schedule.push[entered])
    return times


def _totals(rows: Sequence[Row]) -> Iterator[Chart]:
    """Yields the total time of all runs on a cluster, and how much of it workers wait."""
    for number, (title, group) in enumerate(groupby(rows, key=_title)):
        runs = list(group)
        total = np.array([row.total_seconds for row in runs])
        waiting = total * [row.waiting_share for row in runs]
        texts = [f"{grouped(row.total_seconds, 4)} s, {percent(row.waiting_share)}" for row in runs]
        traces = [
            _bars(runs, total - waiting, "computing and communicating", "s"),
            _bars(runs, waiting, "waiting", "s", text=texts, textposition="outside",
                  cliponaxis=False),
        ]  # fmt: skip
        colours = traces[1]["marker"]["color"]
        traces[1]["marker"] = {"color": [f"{colour}59" for colour in colours]}  # pale
        layout = charts.bar_layout(len(runs), title={"text": "virtual seconds"},
                                   range=[0, 1.35 * total.max()])  # fmt: skip
        caption = "Time for the same number of samples; pale and in percent: waiting, on average."
        table = [["run", "seconds", "waiting", "efficiency"]] + [
            [row.title, grouped(row.total_seconds, 5), percent(row.waiting_share, 1),
             f"{row.efficiency:.4f}"] for row in runs
        ]  # fmt: skip
        name = f"totals-{number}"
        yield Chart(name, f"Total time: {title}", caption, traces, layout, table, wide=True)


def _bars(
    rows: Sequence[Row], values: Floats, label: str, unit: str, **more: object
) -> charts.Trace:
    """Returns a bar for each run in the colour of its policy."""
    names = [escape(row.title, quote=False) for row in rows]
    trace = charts.bar(names, values, label, "", unit, showlegend=False, **more)
    return trace | {"marker": {"color": [charts.policy_colour(row.policy) for row in rows]}}


def _updates(results: Sequence[Result]) -> Iterator[Chart]:
    """Yields the mean seconds between updates, over consecutive windows."""

    def windows(result: Result) -> tuple[Floats, Floats]:
        times = update_times(result.run)
        per = max(1, len(times) // _WINDOWS)
        marks = np.concatenate([[0.0], times[per - 1 :: per]])
        return marks[1:], np.diff(marks) / per

    for i, (title, group) in enumerate(groupby(results, key=lambda result: _title(result.row))):
        curves = [_Curve(result.row.title, result.row.policy, *windows(result)) for result in group]
        yield _chart(f"updates-{i}", f"Updates: {title}", "seconds per update", curves)


def _scaling(rows: Sequence[Row]) -> Chart:
    """Returns efficiency by number of workers, a line for each scheme of each scenario."""
    several = len({row.name for row in rows}) > 1

    def scheme(row: Row) -> tuple[str, str]:
        return f"{row.name}: {row.title}" if several else row.title, row.policy

    curves = []
    for (name, policy), group in groupby(sorted(rows, key=scheme), key=scheme):
        points = sorted((row.workers, row.efficiency) for row in group)
        curves.append(_Curve(name, policy, *np.array(points, np.float64).T))
    chart = _chart("scaling", "Scaling", "efficiency", curves, "workers")
    sizes = sorted({row.workers for row in rows})
    chart.layout["xaxis"] |= {"type": "log", "tickvals": sizes, "ticktext": list(map(str, sizes))}
    return chart


class _Curve(NamedTuple):
    """Curve of a run, and the name of its policy."""

    label: str
    policy: str
    x: Floats
    y: Floats


def _chart(
    name: str, title: str, y: str, curves: Iterable[_Curve], x: str = "virtual seconds"
) -> Chart:
    """Returns curves with their names beside their ends, in the order of these."""
    curves, last_numbers = list(curves), dict[str, int]()
    traces, labels = [], []
    for curve in curves:
        number = last_numbers[curve.policy] = last_numbers.get(curve.policy, -1) + 1
        style = {"color": charts.policy_colour(curve.policy), "dash": charts.DASHES[number % 3]}
        traces.append(charts.curve(curve.x, curve.y, curve.label, mode="lines+markers", **style))
        labels.append((traces[-1]["name"], style["color"], float(curve.y[-1])))
    layout = charts.axes(x, y, legend=False, height=max(320, 70 + 16 * len(curves)))
    charts.label_ends(layout, labels, max(float(curve.y.max()) for curve in curves))
    return Chart(name, title, f"{y}, by {x}.".capitalize(), traces, layout, wide=True)


def _title(row: Row) -> str:
    return f"{row.name}, {row.workers} workers"
