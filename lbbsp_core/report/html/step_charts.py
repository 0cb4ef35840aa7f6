"""Charts of a run whose workers are in the same step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lbbsp_core.report.charts import (
    BUSY,
    COMMUNICATION,
    FORECAST,
    MEASURED,
    WAITING,
    Chart,
    Floats,
    Trace,
    axes,
    bar,
    bar_layout,
    lines,
    panel_title,
    rounded,
    rows_height,
    short_name,
    spans,
    spread_table,
)
from lbbsp_core.report.html.figures import RunReport
from lbbsp_core.report.html.table import StepTable
from lbbsp_core.report.words import percent

_LAST_STEPS = 12


def step_charts(report: RunReport) -> Iterator[Chart]:
    """Yields the charts of a run whose workers are in the same step."""
    yield _step_times(report)
    yield _shares(report)
    yield _waiting_history(report.measured)
    yield batch_chart(report.table)
    yield _last_steps(report.measured)
    yield _speeds(report.measured)
    yield from _forecasts(report)


def batch_chart(table: StepTable, names: Sequence[str] | None = None) -> Chart:
    """Returns the batch size of each worker in each full step."""
    full = ~table.is_short if not table.is_short.all() else table.is_short
    traces = lines(table.steps[full], table.sizes[full], names or _names(table), shape="hv")
    rows = spread_table("worker", _by_rank(table.sizes[full]))
    caption = "Batch size of each worker in each full step."
    layout = axes("step", "samples")
    return Chart("batches", "Batch sizes", caption, traces, layout, rows, wide=True)


def _names(table: StepTable) -> list[str]:
    return [short_name(rank) for rank in range(table.workers)]


def _by_rank(values: Floats) -> dict[str, Floats]:
    return {str(rank): own for rank, own in enumerate(values.T)}


def _step_times(report: RunReport) -> Chart:
    steps = report.measured.steps
    times = {"measured": 1e3 * report.measured.wall}
    traces = lines(steps, times["measured"][:, None], ["measured"], color=BUSY)
    caption = "Time of each measured step"
    if report.plain is not None:
        name = "plain BSP (estimate)"
        times[name] = 1e3 * report.plain.seconds
        traces = lines(steps, times[name][:, None], [name], color=WAITING) + traces  # below
        caption += ", and the time that it would have taken with equal batches at the same speeds"
    rows = spread_table("time of a step, ms", times)
    layout = axes("step", "ms")
    return Chart("steps", "Time of a step", f"{caption}.", traces, layout, rows, wide=True)


def _shares(report: RunReport) -> Chart:
    names = _names(report.table)
    parts = (
        ("busy", [worker.busy_share for worker in report.workers], BUSY),
        ("waiting for slower workers", [w.waiting_share for w in report.workers], WAITING),
        ("communication", [report.communication_share] * len(names), COMMUNICATION),
    )
    traces = [bar(names, 100 * np.array(values), what, colour) for what, values, colour in parts]
    caption = "Shares of the time of each worker, over all measured steps; the table below has the "
    caption += "same figures."
    return Chart("shares", "Where the time goes", caption, traces, bar_layout(len(names)))


def _waiting_history(table: StepTable) -> Chart:
    edges = np.unique(np.linspace(0, len(table.steps), min(len(table.steps), 150) + 1).astype(int))
    slowest = table.busy.max(axis=1)[:, None]
    waits = np.add.reduceat(slowest - table.busy, edges[:-1], axis=0)
    share = waits / np.add.reduceat(np.maximum(table.wall, slowest[:, 0]), edges[:-1])[:, None]
    trace = {
        "type": "heatmap",
        "x": table.steps[edges[:-1]].tolist(),
        "y": _names(table),
        "z": [rounded(100 * own) for own in share.T],
        "zmin": 0,
        "zmax": max(50.0, float(f"{100 * share.max():.3g}")),
        "colorscale": [[0, "#2f7fc1"], [0.15, "#8fbcdc"], [0.4, "#f3d9a4"], [1, "#d9730d"]],
        "colorbar": {"ticksuffix": " %", "thickness": 10, "outlinewidth": 0},
        "hovertemplate": "%{y}, from step %{x}: waited %{z:.0f} %<extra></extra>",
    }
    layout = axes("step", "", height=rows_height(table.workers, 26), legend=False)
    layout["yaxis"] = {"autorange": "reversed", "automargin": True, "showgrid": False}
    first, second = share[: (len(share) + 1) // 2], share[len(share) // 2 :]
    rows = [["worker", "first half", "second half"]]
    for rank in range(table.workers):
        means = (first[:, rank].mean(), second[:, rank].mean())
        rows.append([str(rank), *(percent(mean, 1) for mean in means)])
    caption = "Share of the time for which each worker waited for slower ones, over the run: blue "
    caption += "is busy, orange is waiting."
    return Chart("waiting", "Waiting over the run", caption, [trace], layout, rows)


def _last_steps(table: StepTable) -> Chart:
    busy, wall = table.busy[-_LAST_STEPS:], table.wall[-_LAST_STEPS:]
    slowest = busy.max(axis=1)
    ends = np.cumsum(np.maximum(wall, slowest))
    begin = np.broadcast_to((ends - np.maximum(wall, slowest))[:, None], busy.shape)
    ready, arrived = begin + busy, begin + slowest[:, None]
    y = [name for name in _names(table) for _ in wall]
    parts = (
        ("busy", begin, ready, BUSY),
        ("waiting for slower workers", ready, arrived, WAITING),
        ("communication", arrived, np.broadcast_to(ends[:, None], busy.shape), COMMUNICATION),
    )
    traces = [
        spans(y, 1e3 * start.T.ravel(), 1e3 * end.T.ravel(), what, colour, "ms")
        for what, start, end, colour in parts
    ]
    layout = bar_layout(table.workers, title={"text": "ms"}, rangemode="tozero")
    layout |= {"barmode": "overlay", "height": max(layout["height"], 320)}
    rows = [["worker", "busy, ms", "waiting for slower workers, ms"]]
    for rank in range(table.workers):
        own = (busy[:, rank].mean(), (slowest - busy[:, rank]).mean())
        rows.append([str(rank), *(f"{1e3 * mean:.3g}" for mean in own)])
    caption = f"Timeline of the last {len(wall)} measured steps; the table holds means."
    return Chart("timeline", "The last steps", caption, traces, layout, rows)


def _speeds(table: StepTable) -> Chart:
    speeds = table.amounts / table.busy
    caption = "Speed of each worker: its batch divided by its busy time."
    layout = axes("step", "work/s" if table.has_work else "samples/s")
    rows = spread_table("worker", _by_rank(speeds))
    traces = lines(table.steps, speeds, _names(table))
    return Chart("speeds", "Speeds", caption, traces, layout, rows)


def _forecasts(report: RunReport) -> Iterator[Chart]:
    """Yields measured and predicted busy times, one panel for each of at most eight workers."""
    table = report.measured
    known = [w for w in report.workers if w.forecast_rmse is not None]
    shown = sorted(known, key=lambda w: w.forecast_rmse or 0.0)[-8:]
    if not shown:
        return
    traces: list[Trace] = []
    layout = axes("step", "ms", height=130 * len(shown) + 110)
    layout["annotations"], gap = [], 0.01
    height = (1 - gap * (len(shown) - 1)) / len(shown)
    for row, rank in enumerate(sorted(worker.rank for worker in shown)):
        axis = "y" + str(row + 1) * bool(row)
        for name, values, colour, width in (
            ("measured", table.busy[:, rank], MEASURED, 3),
            ("forecast", table.predicted[:, rank], FORECAST, 1.3),
        ):
            (line,) = lines(table.steps, 1e3 * values[:, None], [name], color=colour, width=width)
            traces.append(line | {"yaxis": axis, "legendgroup": name, "showlegend": row == 0})
        top = 1 - row * (height + gap)
        bottom = max(top - height, 0.0)
        layout["annotations"].append(panel_title(f"{short_name(rank)}, ms", top))
        layout["yaxis" + str(row + 1) * bool(row)] = {
            "domain": [bottom, top - 0.2 * height], "rangemode": "tozero", "nticks": 4,
            "automargin": True,
        }  # fmt: skip
    layout["xaxis"]["anchor"] = "y" + str(len(shown)) * (len(shown) > 1)
    caption = "Busy time of each worker, and the forecast from which its batch size followed."
    if len(shown) < len(known):
        caption += f" The {len(shown)} workers with the largest errors are shown."
    yield Chart("forecasts", "Forecasts and measurements", caption, traces, layout, wide=True)
