"""Pictures that commands draw: pages with the charts of a comparison or of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lbbsp_core.report import charts
from lbbsp_core.report.charts import Chart
from lbbsp_core.report.page import Content, write_page
from lbbsp_core.report.summary import Comparison, RunSummary, summarise
from lbbsp_core.runtime.record.record import Run

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
    bsp: Run, lbbsp: Run, path: Path, *, speeds: Sequence[float] | None = None, note: str = ""
) -> None:
    """Draws two runs of one training, plain and balanced, as an HTML page.

    The upper charts show one bar per worker, busy time followed by waiting time, for both runs on
    one scale. The lower chart shows the batch sizes of the balanced run, step by step.

    Args:
        bsp: Record of the plain run.
        lbbsp: Record of the balanced run.
        path: File to write; its folder is created.
        speeds: Relative speed of each worker, shown beside its name.
        note: Line under the title, such as the accuracies.
    """
    from lbbsp_core.report.html.step_charts import batch_chart  # imports parts of SciPy
    from lbbsp_core.runtime.record.table import step_table

    comparison = Comparison(summarise(bsp), summarise(lbbsp))
    names = _names(speeds or [1.0] * comparison.lbbsp.workers)
    scale = 1.05e3 * max(comparison.bsp.step_seconds, comparison.lbbsp.step_seconds)
    drawn = [
        _step_chart("plain", "Plain BSP: equal batches", bsp, comparison.bsp, names, scale),
        _step_chart("balanced", "LB-BSP: balanced batches", lbbsp, comparison.lbbsp, names, scale),
        batch_chart(step_table(lbbsp), names),
    ]
    verdict = f"LB-BSP trains {comparison.speedup:.2f}× as fast as plain BSP"
    write_page(Content("demo", "lbbsp demo", verdict, drawn, note=note), path)


def _names(speeds: Sequence[float]) -> list[str]:
    fastest = max(speeds)
    return [
        charts.short_name(rank) + f", {speed / fastest:.2g} × speed" * (speed < fastest)
        for rank, speed in enumerate(speeds)
    ]


def _step_chart(
    name: str, title: str, run: Run, summary: RunSummary, names: Sequence[str], scale: float
) -> Chart:
    """Returns the busy and waiting milliseconds of a step, as a bar per worker."""
    step = 1e3 * summary.step_seconds
    busy = np.minimum(1e3 * np.array(summary.busy_seconds), step)
    sizes = [round(median(own)) for own in zip(*(s.sizes for s in run.last_half()), strict=True)]
    texts = [f"{size} samples" for size in sizes]
    traces = [
        charts.bar(names, busy, "busy", charts.BUSY, "ms", text=texts, insidetextanchor="middle"),
        charts.bar(names, step - busy, "waiting", charts.WAITING, "ms"),
    ]
    rows = [["worker", "samples", "busy, ms", "waiting, ms"]]
    for rank, size in enumerate(sizes):
        rows.append([str(rank), str(size), f"{busy[rank]:.0f}", f"{step - busy[rank]:.0f}"])
    caption = f"{step:.0f} ms a step: medians of the last half of the run."
    layout = charts.bar_layout(len(names), title={"text": "ms"}, range=[0, scale])
    return Chart(name, title, caption, traces, layout, rows)


def draw_profile(result: ProfileResult, path: Path) -> None:
    """Draws seconds by batch size, and the relative error of each fit; marks the best."""
    batches = np.array([point.batch for point in result.points], np.float64)
    seconds = np.array([point.seconds for point in result.points])
    dense = np.unique(np.geomspace(batches[0], batches[-1], 400))
    measured = charts.curve(batches, 1e3 * seconds, "measured", mode="markers")
    measured |= {"marker": {"color": charts.MEASURED, "size": 9}}
    fits, errors = [], []
    for name, fit in result.fits.items():
        error = "" if fit.cv_error is None else f", {100 * fit.cv_error:.1f} % on unseen batches"
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
        Chart("curve", "Time of a step", caption, [*fits, measured], layouts[0], wide=True),
        Chart("errors", "Errors", "Error of each fit.", errors, layouts[1], wide=True),
    ]
    write_page(Content("profile", "lbbsp profile", result.device, drawn), path)
