"""Charts of a run whose workers are in the same step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lbbsp_core.report.charts import (
    BUSY,
    COMMUNICATION,
    WAITING,
    Chart,
    Trace,
    axes,
    bar,
    bar_layout,
    lines,
    panel_title,
    rounded,
    rows_height,
    short_name,
    spread,
)
from lbbsp_core.report.html.figures import RunReport
from lbbsp_core.report.html.table import Floats
from lbbsp_core.report.html.words import percent

_LAST_STEPS = 12


def step_charts(report: RunReport) -> Iterator[Chart]:
    """Yields the charts of a run whose workers are in the same step."""
    yield _step_times(report)
    yield _shares(report)
    yield _waiting_history(report)
    yield _batch_sizes(report)
    yield _last_steps(report)
    yield _speeds(report)
    yield from _forecasts(report)


def _step_times(report: RunReport) -> Chart:
    table, plain = report.measured, report.plain
    traces = []
    if plain is not None:
        traces += lines(table.steps, 1e3 * plain.seconds[:, None], ["plain BSP (estimate)"],
                         colour=WAITING)  # fmt: skip
    traces += lines(table.steps, 1e3 * table.wall[:, None], ["measured"], colour=BUSY)
    if report.plain is None:
        caption = "Time of each measured step."
    else:
        caption = "Time of each measured step, and the time that it would have taken with equal "
        caption += "batches at the same speeds."
    rows = [["time of a step, ms", "smallest", "median", "largest"]]
    rows.append(["measured", *spread(1e3 * table.wall)])
    if plain is not None:
        rows.append(["plain BSP (estimate)", *spread(1e3 * plain.seconds)])
    return Chart("steps", "Time of a step", caption, traces, axes("step", "ms"), rows, wide=True)


def _shares(report: RunReport) -> Chart:
    ranks = [worker.rank for worker in report.workers]
    parts = (
        ("busy", [worker.busy_share for worker in report.workers], BUSY),
        ("waiting for slower workers", [w.waiting_share for w in report.workers], WAITING),
        ("communication", [report.communication_share] * len(ranks), COMMUNICATION),
    )
    traces = [bar(ranks, values, name, colour) for name, values, colour in parts]
    caption = "Shares of the time of each worker, over all measured steps; the table below has the "
    caption += "same figures."
    layout = bar_layout(len(ranks))
    return Chart("shares", "Where the time goes", caption, traces, layout)


def _waiting_history(report: RunReport) -> Chart:
    table = report.measured
    edges = np.unique(np.linspace(0, len(table.steps), min(len(table.steps), 150) + 1).astype(int))
    slowest = table.busy.max(axis=1)[:, None]
    waits = np.add.reduceat(slowest - table.busy, edges[:-1], axis=0)
    share = waits / np.add.reduceat(np.maximum(table.wall, slowest[:, 0]), edges[:-1])[:, None]
    trace = {
        "type": "heatmap",
        "x": table.steps[edges[:-1]].tolist(),
        "y": [short_name(rank) for rank in range(table.workers)],
        "z": [rounded(100 * share[:, rank]) for rank in range(table.workers)],
        "zmin": 0,
        "zmax": max(50.0, float(f"{100 * share.max():.3g}")),
        "colorscale": [[0, "#2f7fc1"], [0.15, "#8fbcdc"], [0.4, "#f3d9a4"], [1, "#d9730d"]],
        "colorbar": {"ticksuffix": " %", "thickness": 10, "outlinewidth": 0},
        "hovertemplate": "%{y}, from step %{x}: waited %{z:.0f} %<extra></extra>",
    }
    layout = axes("step", "", height=rows_height(table.workers, 26), legend=False)
    layout["yaxis"] = {"autorange": "reversed", "automargin": True, "showgrid": False}
    halves = [["worker", "first half", "second half"]]
    parts = len(share)
    for rank in range(table.workers):
        means = (share[: (parts + 1) // 2, rank].mean(), share[parts // 2 :, rank].mean())
        halves.append([str(rank), *(percent(mean, 1) for mean in means)])
    caption = "Share of the time for which each worker waited for slower ones, over the run: blue "
    caption += "is busy, orange is waiting."
    return Chart("waiting", "Waiting over the run", caption, [trace], layout, halves)


def _last_steps(report: RunReport) -> Chart:
    table = report.measured
    last = slice(max(len(table.steps) - _LAST_STEPS, 0), None)
    busy, slowest = table.busy[last], table.busy[last].max(axis=1)
    wall = np.maximum(table.wall[last], slowest)
    starts = np.concatenate([[0.0], np.cumsum(wall)[:-1]])
    y = [short_name(rank) for rank in range(table.workers) for _ in wall]

    def spans(name: str, first: Floats, length: Floats, colour: str) -> Trace:
        return {
            "type": "bar", "orientation": "h", "name": name, "y": y,
            "base": rounded(1e3 * first.T.ravel()), "x": rounded(1e3 * length.T.ravel()),
            "marker": {"color": colour, "line": {"width": 1, "color": "rgba(255,255,255,0.6)"}},
            "hovertemplate": f"%{{y}} {name}: %{{x:.1f}} ms<extra></extra>",
        }  # fmt: skip

    begin = np.repeat(starts[:, None], table.workers, axis=1)
    ready, arrived = begin + busy, begin + slowest[:, None]
    traces = [
        spans("busy", begin, busy, BUSY),
        spans("waiting for slower workers", ready, arrived - ready, WAITING),
        spans("communication", arrived, begin + wall[:, None] - arrived, COMMUNICATION),
    ]
    layout = bar_layout(table.workers)
    layout |= {"barmode": "overlay", "height": max(layout["height"], 320)}
    layout["xaxis"] = {"title": {"text": "ms"}, "rangemode": "tozero", "automargin": True}
    rows = [["worker", "busy, ms", "waiting for slower workers, ms"]]
    for rank in range(table.workers):
        own = (busy[:, rank].mean(), (slowest - busy[:, rank]).mean())
        rows.append([str(rank), *(f"{1e3 * mean:.3g}" for mean in own)])
    caption = f"Timeline of the last {len(wall)} measured steps; the table holds means."
    return Chart("timeline", "The last steps", caption, traces, layout, rows)


def _batch_sizes(report: RunReport) -> Chart:
    table = report.table
    full = ~table.is_short if not table.is_short.all() else table.is_short
    names = [short_name(rank) for rank in range(table.workers)]
    traces = lines(table.steps[full], table.sizes[full], names, shape="hv")
    rows = [["worker", "smallest", "median", "largest"]]
    rows += [[str(r), *spread(table.sizes[full, r])] for r in range(table.workers)]
    caption = "Batch size of each worker in each full step."
    layout = axes("step", "samples")
    return Chart("batches", "Batch sizes", caption, traces, layout, rows, wide=True)


def _speeds(report: RunReport) -> Chart:
    table = report.measured
    speeds = table.amounts / table.busy
    names = [short_name(rank) for rank in range(table.workers)]
    rows = [["worker", "smallest", "median", "largest"]]
    rows += [[str(rank), *spread(speeds[:, rank])] for rank in range(table.workers)]
    unit = "work/s" if table.has_work else "samples/s"
    caption = "Speed of each worker: its batch divided by its busy time."
    traces = lines(table.steps, speeds, names)
    return Chart("speeds", "Speeds", caption, traces, axes("step", unit), rows)


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
            ("measured", table.busy[:, rank], "#9aa5b1", 3),
            ("forecast", table.predicted[:, rank], "#d1495b", 1.3),
        ):
            (line,) = lines(table.steps, 1e3 * values[:, None], [name], colour=colour)
            line.update(yaxis=axis, legendgroup=name, showlegend=row == 0)
            traces.append(line | {"line": {"color": colour, "width": width}})
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
