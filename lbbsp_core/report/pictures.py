"""Pictures that commands draw: pages with the charts of a comparison or of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lbbsp_core.report import charts
from lbbsp_core.report.charts import Chart
from lbbsp_core.report.page import Content, write_page
from lbbsp_core.report.summary import measured, summary_of
from lbbsp_core.report.wording import compared, duration, grouped, percent
from lbbsp_core.runtime.record.record import Run
from lbbsp_core.runtime.record.table import StepTable, step_table

if TYPE_CHECKING:
    from lbbsp_core.profiler import ProfileResult

# Fits that nearly agree stay visible: each is narrower than those before it, or broken.
_FITS: Final[dict[str, dict[str, Any]]] = {
    "proportional": {"color": "#5f6b7a", "width": 1.5},
    "affine": {"color": "#8fbcdc", "width": 6},
    "saturating": {"color": "#d1495b", "width": 2.5, "dash": "dash"},
    "profile": {"color": "#2a9d8f", "width": 1.3, "dash": "dot"},
}


def draw_comparison(
    first: Run,
    second: Run,
    path: Path,
    *,
    names: tuple[str, str] = ("plain BSP", "LB-BSP"),
    speeds: Sequence[float] | None = None,
    note: str = "",
    command: str = "demo",
) -> dict[str, object]:
    """Draws two runs side by side, as an HTML page.

    The upper charts show one bar per worker for the mean step of each run, on one scale: busy,
    waiting for slower workers, communication. The others show the time of each step, and the batch
    sizes.

    Args:
        first: Record of the run that is compared with, such as the plain one.
        second: Record of the other run, such as the balanced one.
        path: File to write; its folder is created.
        names: Name of each run.
        speeds: Relative speed of each worker, shown beside its name.
        note: Line under the title, such as the accuracies.
        command: Command that writes the page.

    Returns:
        The figures, as ``lbbsp report --json`` writes them for two runs.

    Raises:
        ValueError: A run cannot be compared: it has no measured step, or no common steps.
    """
    from lbbsp_core.report.html.step_charts import batch_chart  # imports parts of SciPy

    tables = [_measured(run, name) for run, name in zip((first, second), names, strict=True)]
    summaries = [summary_of(table) for table in tables]
    speedup = summaries[1].samples_per_second / summaries[0].samples_per_second
    scale = 1.05e3 * max(float(table.seconds.mean()) for table in tables)
    labels = [_names(speeds or [1.0] * table.workers) for table in tables]
    sides = list(zip(("first", "second"), names, tables, labels, strict=True))
    drawn = [_step_chart(side, name, table, workers, scale) for side, name, table, workers in sides]
    drawn.append(_times(names, tables))
    for side, name, table, workers in sides:
        chart = batch_chart(table, workers)
        title = f"{chart.title}: {name}"
        drawn.append(replace(chart, name=f"batches-{side}", title=title, wide=False))
    verdict = f"{names[1]} trains {compared(names[0], speedup)}"
    differences = _differences(tables)
    values = {"names": names, "summaries": summaries, "tables": tables, "differences": differences}
    title = f"lbbsp {command}: {names[0]}, {names[1]}"
    content = Content(
        command, title, verdict, drawn, note=note, template="compare.html", values=values
    )
    write_page(content, path)
    runs = [
        {
            "name": name,
            "step_seconds": summary.step_seconds,
            "samples_per_second": summary.samples_per_second,
            "communication_seconds": summary.communication_seconds,
            **summary.figures._asdict(),
            "measured_steps": len(table.steps),
        }
        for name, summary, table in zip(names, summaries, tables, strict=True)
    ]
    return {"verdict": verdict, "speedup": speedup, "runs": runs, "differences": differences}


def _measured(run: Run, name: str) -> StepTable:
    if run.pushes:
        raise ValueError(
            f"{name} is the record of an asynchronous run: only runs whose workers are in the same "
            "step can be compared"
        )
    try:
        return measured(step_table(run))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _differences(tables: Sequence[StepTable]) -> dict[str, list[str]]:
    """Returns what differs between the settings of two runs, by name."""
    compared = ("framework", "workers", "global_batch_size", "num_samples", "seed", "lag", "policy",
                "predictor", "cost", "hosts", "devices", "versions")  # fmt: skip
    values = {name: [_shown(getattr(table.header, name)) for table in tables] for name in compared}
    return {name.replace("_", " "): both for name, both in values.items() if both[0] != both[1]}


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        value = tuple(f"{name} {text}" for name, text in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _names(speeds: Sequence[float]) -> list[str]:
    fastest = max(speeds)
    return [
        charts.short_name(rank) + f", {speed / fastest:.2g} × speed" * (speed < fastest)
        for rank, speed in enumerate(speeds)
    ]


def _step_chart(
    side: str, name: str, table: StepTable, names: Sequence[str], scale: float
) -> Chart:
    """Returns what each worker does in the mean step of a run, in milliseconds, as bars."""
    sizes, busy = table.sizes.mean(axis=0), 1e3 * table.busy.mean(axis=0)
    waits = 1e3 * (table.slowest[:, None] - table.busy).mean(axis=0)
    communication = np.full_like(busy, 1e3 * float((table.seconds - table.slowest).mean()))
    texts = [f"{grouped(size)} samples" for size in sizes]
    traces = [
        charts.bar(names, busy, "busy", charts.BUSY, "ms", text=texts, insidetextanchor="middle"),
        charts.bar(names, waits, "waiting for other workers", charts.WAITING, "ms"),
        charts.bar(names, communication, "communication", charts.COMMUNICATION, "ms"),
    ]
    rows = [["worker", "samples", "busy, ms", "waiting for other workers, ms"]]
    for rank, size in enumerate(sizes):
        rows.append([str(rank), grouped(size, 4), grouped(busy[rank]), grouped(waits[rank])])
    caption = f"Means of {len(table.steps):,} measured steps, "
    caption += f"{duration(table.seconds.mean())} each."
    layout = charts.bar_layout(len(names), title={"text": "ms"}, range=[0, scale])
    return Chart(side, name, caption, traces, layout, rows)


def _times(names: Sequence[str], tables: Sequence[StepTable]) -> Chart:
    """Returns the time of each step of two runs."""
    traces, columns = [], {}
    for number, (name, table) in enumerate(zip(names, tables, strict=True)):
        columns[f"{number + 1}: {name}"] = 1e3 * table.seconds
        times = 1e3 * table.seconds[:, None]
        traces += charts.lines(table.steps, times, [name], color=charts.RUNS[number])
    caption = "Time of each measured step of both runs."
    rows = charts.spread_table("time of a step, ms", columns)
    return Chart("steps", "Time of a step", caption, traces, charts.axes("step", "ms"), rows, True)


def draw_profile(result: ProfileResult, path: Path) -> None:
    """Draws seconds by batch size, and the relative error of each fit; marks the best."""
    batches = np.array([point.batch for point in result.points], np.float64)
    seconds = np.array([point.seconds for point in result.points])
    dense = np.unique(np.geomspace(batches[0], batches[-1], 400))
    points = charts.curve(batches, 1e3 * seconds, "measured", mode="markers")
    points |= {"marker": {"color": charts.MEASURED, "size": 9}}
    fits, errors = [], []
    for name, fit in result.fits.items():
        error = "" if fit.cv_error is None else f", {percent(fit.cv_error, 1)} on unseen batches"
        line = _FITS.get(name, {})
        fits.append(charts.curve(dense, 1e3 * fit.cost(dense), name + error, **line))
        if name == result.best:
            fits[-1]["name"] = f"<b>{name}{error} (best)</b>"
        errors.append(charts.curve(batches, 100 * (fit.cost(batches) / seconds - 1), name, **line))
    layouts = charts.axes("samples", "ms"), charts.axes("samples", "fit / measured - 1, %")
    layouts[0]["yaxis"]["type"] = "log"
    caption, shapes = "Time of a step by batch size, measured and as each cost form fits it.", []
    if (limit := result.out_of_memory_at) is not None:
        caption += f" Out of memory at {limit}."
        dots = {"dash": "dot", "width": 1, "color": charts.MEASURED}
        shapes = [{"type": "line", "x0": limit, "x1": limit, "y0": 0, "y1": 1, "yref": "paper",
                   "line": dots}]  # fmt: skip
    for layout in layouts:
        layout["xaxis"]["type"], layout["shapes"] = "log", shapes
    drawn = [
        Chart("curve", "Time of a step", caption, [*fits, points], layouts[0], wide=True),
        Chart("errors", "Errors", "Error of each fit.", errors, layouts[1], wide=True),
    ]
    write_page(Content("profile", "lbbsp profile", result.device, drawn), path)
