"""Charts of a run whose workers are in the same step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lbbsp_core.report import charts
from lbbsp_core.report.charts import Chart, Floats, Integers
from lbbsp_core.report.html.figures import RunReport
from lbbsp_core.report.wording import grouped, percent
from lbbsp_core.runtime.record.table import StepTable

_LAST_STEPS = 12


def step_charts(report: RunReport) -> Iterator[Chart]:
    """Yields the charts of a run whose workers are in the same step."""
    table = report.measured
    yield _step_times(report)
    yield _shares(report)
    yield _waiting_history(table)
    yield batch_chart(report.table)
    yield _last_steps(table)
    caption = "Speed of each worker: its batch divided by its busy time."
    unit = "work/s" if table.has_work else "samples/s"
    yield _by_worker("speeds", "Speeds", caption, unit, table.steps, table.amounts / table.busy)
    yield from _forecasts(report)
    for number, (name, values) in enumerate(report.table.values.items()):
        title = f"Values of extensions: {name}"
        caption = f'"{name}" of each worker in each step, as an extension has recorded it.'
        yield _by_worker(f"value-{number}", title, caption, "", report.table.steps, values)


def batch_chart(table: StepTable, names: Sequence[str] | None = None) -> Chart:
    """Returns the batch size of each worker in each full step."""
    steps, sizes = table.steps[table.is_full], table.sizes[table.is_full]
    traces = charts.lines(steps, sizes, names or _names(table.workers), shape="hv")
    rows = charts.spread_table("worker", _by_rank(sizes))
    caption = "Batch size of each worker in each full step."
    layout = charts.axes("step", "samples")
    return Chart("batches", "Batch sizes", caption, traces, layout, rows, wide=True)


def _by_worker(
    name: str, title: str, caption: str, unit: str, steps: Integers, values: Floats
) -> Chart:
    """Returns a curve for each worker; values have the shape ``(n, N)``."""
    traces = charts.lines(steps, values, _names(values.shape[1]))
    rows = charts.spread_table("worker", _by_rank(values))
    return Chart(name, title, caption, traces, charts.axes("step", unit), rows)


def _by_rank(values: Floats) -> dict[str, Floats]:
    return {str(rank): column for rank, column in enumerate(values.T)}


def _names(workers: int) -> list[str]:
    return list(map(charts.short_name, range(workers)))


def _step_times(report: RunReport) -> Chart:
    caption, table = "Time of each measured step", report.measured
    steps = table.steps
    times = {"measured": 1e3 * table.seconds}
    traces = charts.lines(steps, times["measured"][:, None], ["measured"], color=charts.MEASURED)
    if report.was_balanced:
        name = "even batches (estimate)"
        times[name] = 1e3 * (table.seconds - table.slowest + table.even)
        # Below the measured curve, which is drawn last.
        traces = charts.lines(steps, times[name][:, None], [name], color=charts.ESTIMATED) + traces
        caption += ", and the time that it would have taken with equal batches at the same speeds"
    rows, layout = charts.spread_table("time of a step, ms", times), charts.axes("step", "ms")
    return Chart("steps", "Time of a step", f"{caption}.", traces, layout, rows, wide=True)


def _shares(report: RunReport) -> Chart:
    names = _names(report.table.workers)
    parts = (
        ("busy", [worker.busy_share for worker in report.workers], charts.BUSY),
        ("waiting for other workers", [w.waiting for w in report.workers], charts.WAITING),
        ("communication", [report.figures.communication] * len(names), charts.COMMUNICATION),
    )
    bars = [charts.bar(names, 100 * np.array(row), label, colour) for label, row, colour in parts]
    caption = "Shares of the time of each worker, over all measured steps; the table below has the "
    caption += "same figures."
    if report.figures.hides:
        hidden = percent(report.figures.hidden_communication)
        caption += f" Communication is what was not hidden: another {hidden} was, while the "
        caption += "slowest worker computed."
    return Chart("shares", "Where the time goes", caption, bars, charts.bar_layout(len(names)))


def _waiting_history(table: StepTable) -> Chart:
    edges = np.unique(np.linspace(0, len(table.steps), min(len(table.steps), 150) + 1).astype(int))
    waits = np.add.reduceat(table.slowest[:, None] - table.busy, edges[:-1], axis=0)
    share = waits / np.add.reduceat(table.seconds, edges[:-1])[:, None]
    trace = {
        "type": "heatmap",
        "x": table.steps[edges[:-1]].tolist(),
        "y": _names(table.workers),
        "z": [charts.rounded(100 * row) for row in share.T],
        "zmin": 0,
        "zmax": max(50.0, float(f"{100 * share.max():.3g}")),
        "colorscale": [[0, charts.BUSY], [0.15, "#8fbcdc"], [0.4, "#f3d9a4"], [1, charts.WAITING]],
        "colorbar": {"ticksuffix": " %", "thickness": 10, "outlinewidth": 0},
        "hovertemplate": "%{y}, from step %{x}: waited %{z:.0f} %<extra></extra>",
    }
    layout = charts.axes("step", "", height=charts.rows_height(table.workers, 26), legend=False)
    layout["yaxis"] = charts.WORKERS_AXIS
    halves = share[: (len(share) + 1) // 2], share[len(share) // 2 :]
    rows = [["worker", "first half", "second half"]]
    for rank, means in enumerate(np.transpose([half.mean(axis=0) for half in halves])):
        rows.append([str(rank), *(percent(mean, 1) for mean in means)])
    caption = "Share of the time for which each worker waited for slower ones, over the run: blue "
    caption += "is busy, orange is waiting."
    return Chart("waiting", "Waiting over the run", caption, [trace], layout, rows)


def _last_steps(table: StepTable) -> Chart:
    busy, wall = 1e3 * table.busy[-_LAST_STEPS:], 1e3 * table.wall[-_LAST_STEPS:]
    slowest = busy.max(axis=1)[:, None]
    lengths = np.maximum(wall[:, None], slowest)
    ends = np.cumsum(lengths, axis=0)
    begin = np.broadcast_to(ends - lengths, busy.shape)
    parts = (
        ("busy", charts.BUSY, begin, begin + busy),
        ("waiting for other workers", charts.WAITING, begin + busy, begin + slowest),
        ("communication", charts.COMMUNICATION, begin + slowest, ends),
    )
    y = [name for name in _names(table.workers) for _ in wall]
    layout = charts.bar_layout(table.workers, title={"text": "ms"}, rangemode="tozero")
    layout |= {"barmode": "overlay", "height": max(layout["height"], 320)}
    rows = [["worker", "busy, ms", "waiting for other workers, ms"]]
    for rank, means in enumerate(np.transpose([busy.mean(axis=0), (slowest - busy).mean(axis=0)])):
        rows.append([str(rank), *map(grouped, means)])
    caption = f"Timeline of the last {len(wall)} measured steps; the table holds means."
    traces = charts.timeline(y, parts, "ms")
    return Chart("timeline", "The last steps", caption, traces, layout, rows)


def _forecasts(report: RunReport) -> Iterator[Chart]:
    """Yields measured and predicted busy times, one panel for each of at most eight workers."""
    table = report.measured
    workers = [w for w in report.workers if w.forecast_rmse is not None]
    shown = sorted(workers, key=lambda w: w.forecast_rmse or 0.0)[-8:]
    if not shown:
        return
    traces: list[charts.Trace] = []
    layout = charts.axes("step", "ms", height=130 * len(shown) + 110)
    layout["annotations"], gap = [], 0.01
    height = (1 - gap * (len(shown) - 1)) / len(shown)
    for row, rank in enumerate(sorted(worker.rank for worker in shown)):
        axis = str(row + 1) if row else ""  # plotly numbers axes from the second one on
        for name, values, colour, width in (
            ("measured", table.busy[:, rank], charts.MEASURED, 3),
            ("forecast", table.predicted[:, rank], charts.ESTIMATED, 1.3),
        ):
            style: dict[str, Any] = {"color": colour, "width": width}
            (line,) = charts.lines(table.steps, 1e3 * values[:, None], [name], **style)
            traces.append(line | {"yaxis": f"y{axis}", "legendgroup": name, "showlegend": not row})
        top = 1 - row * (height + gap)
        layout["annotations"].append({
            "text": f"{charts.short_name(rank)}, ms", "x": 0, "xanchor": "left", "xref": "paper",
            "y": top, "yanchor": "top", "yref": "paper", "showarrow": False, "font": {"size": 11},
        })  # fmt: skip
        domain = [max(top - height, 0.0), top - 0.2 * height]
        layout[f"yaxis{axis}"] = {"domain": domain, "rangemode": "tozero", "nticks": 4,
                                  "automargin": True}  # fmt: skip
    layout["xaxis"]["anchor"] = f"y{axis}"
    caption = "Busy time of each worker, and the forecast from which its batch size followed."
    if len(shown) < len(workers):
        caption += f" The {len(shown)} workers with the largest errors are shown."
    yield Chart("forecasts", "Forecasts and measurements", caption, traces, layout, wide=True)
