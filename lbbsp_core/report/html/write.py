"""Report of a run: reads the record, and writes the page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Final

from lbbsp_core.report.html.advice import advise
from lbbsp_core.report.html.assets import plotly_script
from lbbsp_core.report.html.figures import run_report
from lbbsp_core.report.html.push_charts import push_charts
from lbbsp_core.report.html.pushes import PushReport, advise_pushes, push_report
from lbbsp_core.report.html.step_charts import step_charts
from lbbsp_core.report.html.texts import (
    push_tables,
    push_tiles,
    run_facts,
    step_tables,
    step_tiles,
)
from lbbsp_core.report.page import Content, page
from lbbsp_core.runtime.record.record import Run, read_run

_TEXT_COLUMNS: Final = frozenset({"host", "device", "event", "steps"})

_DEFINITIONS: Final = {
    "Measured steps": "Full steps in which no measurement was excluded and all workers were "
    "measured. All shares are over these steps.",
    "Waiting": "Time from a worker's arrival at the barrier to the next step: waiting for slower "
    "workers, then for the communication. Its share is the sum of all waits / (workers x time).",
    "Communication": "Time from the arrival of the slowest worker to the next step.",
    "Speed-up": "Time that plain BSP would have taken / time of the run. A worker's time for an "
    "even batch is its measured time, scaled by the cost shape: the work of the batch plus an "
    "overhead, which is learned from the changes of its batch size. The slowest worker ends the "
    "step, and the communication stays the same. The range is that of all overheads from none to "
    "X / 2N samples.",
    "Forecast error": "RMSE of the predicted busy times / mean busy time.",
    "Speed": "Median of batch size / busy time.",
}
_PUSH_DEFINITIONS: Final = {
    "Busy": "Sum of the times of a worker's iterations / time of the run.",
    "Staleness": "Updates by other workers between the read of the model from which a gradient was "
    "computed, and its push.",
    "Speed": "Median of batch size / busy time of an iteration.",
}


def write_report(record: Path, out: Path) -> dict[str, object]:
    """Writes the report of a run as one HTML file.

    Args:
        record: File ``run.jsonl``, or the folder that holds it.
        out: File to write; its folder is created.

    Returns:
        The figures, with ``advice``, as ``lbbsp report --json`` writes them.

    Raises:
        ModuleNotFoundError: Plotly is missing.
        OSError: A file cannot be read or written.
        ValueError: The record is missing, invalid or empty; names the place.
    """
    plotly = plotly_script()
    if out.suffix == ".jsonl":
        raise ValueError(f"the report must not replace a run record, got {out}: name an HTML file")
    content, figures = describe(_read(record), str(record))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page(content, plotly), encoding="utf-8", errors="replace")
    return figures


def describe(run: Run, name: str) -> tuple[Content, dict[str, object]]:
    """Returns the content of a run's page, and its figures."""
    try:
        return _content(run, name)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _read(record: Path) -> Run:
    try:
        return read_run(record)
    except FileNotFoundError:
        inner = [path.parent.name for path in sorted(record.glob("*/run.jsonl"))]
        remedy = (
            f"name one of the runs in it: {', '.join(inner)}"
            if inner
            else "name the --run-dir of lbbsp launch, or the folder given as record="
        )
        raise ValueError(f"{record} has no run record (run.jsonl): {remedy}") from None


def _content(run: Run, name: str) -> tuple[Content, dict[str, object]]:
    title, report = f"lbbsp report: {name}", push_report(run) if run.pushes else run_report(run)
    if isinstance(report, PushReport):
        content = Content(
            title=title,
            verdict=report.verdict,
            tiles=push_tiles(report),
            advice=advise_pushes(report),
            charts=list(push_charts(report)),
            tables=push_tables(report),
            facts=run_facts(report.header),
            definitions=_PUSH_DEFINITIONS,
            text_columns=_TEXT_COLUMNS,
        )
    else:
        content = Content(
            title=title,
            verdict=report.verdict,
            tiles=step_tiles(report),
            advice=advise(report),
            charts=list(step_charts(report)),
            tables=step_tables(report),
            facts=run_facts(report.table.header),
            definitions=_DEFINITIONS,
            wide=frozenset({"batches", "forecasts", "steps"}),
            text_columns=_TEXT_COLUMNS,
        )
    return content, {**report.figures(), "advice": [asdict(each) for each in content.advice]}
