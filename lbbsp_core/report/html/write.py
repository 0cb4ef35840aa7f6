"""Report of a run: reads the record, and writes the page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from lbbsp_core.report.html.advice import advise
from lbbsp_core.report.html.figures import RunReport, run_report
from lbbsp_core.report.html.pushes import PushReport, advise_pushes, push_charts, push_report
from lbbsp_core.report.html.step_charts import step_charts
from lbbsp_core.report.page import Content, write_page
from lbbsp_core.report.pictures import draw_comparison
from lbbsp_core.runtime.record.named import read_named_run
from lbbsp_core.runtime.record.record import Run
from lbbsp_core.validate import one_line


def write_report(record: Path, out: Path) -> dict[str, object]:
    """Writes the report of a run as one HTML file.

    Args:
        record: File ``run.jsonl``, or the folder that holds it.
        out: File to write; its folder is created.

    Returns:
        The figures, with ``advice``, as ``lbbsp report --json`` writes them.

    Raises:
        ModuleNotFoundError: Plotly or Jinja2 is missing.
        OSError: A file cannot be read or written.
        ValueError: The record is missing, invalid or empty; names the place.
    """
    _require_html(out)
    content, figures = describe(read_named_run(record), str(record))
    write_page(content, out)
    return figures


def write_comparison(first: Path, second: Path, out: Path) -> dict[str, object]:
    """Writes the comparison of two runs as one HTML file.

    Args:
        first: Record of the run that is compared with: file ``run.jsonl``, or its folder.
        second: Record of the other run.
        out: File to write; its folder is created.

    Returns:
        The figures, as ``lbbsp report --json`` writes them for two runs.

    Raises:
        ModuleNotFoundError: Plotly or Jinja2 is missing.
        OSError: A file cannot be read or written.
        ValueError: A record is missing, invalid, empty or of an asynchronous run; names the run.
    """
    _require_html(out)
    runs = read_named_run(first), read_named_run(second)
    return draw_comparison(*runs, out, names=_short_names(first, second), command="report")


def describe(run: Run, name: str) -> tuple[Content, dict[str, object]]:
    """Returns the content of a run's page, and its figures."""
    report: PushReport | RunReport
    try:
        if run.pushes:
            report, template = push_report(run), "pushes.html"
            advice, charts = advise_pushes(report), list(push_charts(report))
        else:
            report, template = run_report(run), "steps.html"
            advice, charts = advise(report), list(step_charts(report))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    values = {"report": report, "header": run.header, "advice": advice}
    title = f"lbbsp report: {name}"
    content = Content("report", title, report.verdict, charts, template=template, values=values)
    return content, {**report.to_json(), "advice": [asdict(piece) for piece in advice]}


def _require_html(out: Path) -> None:
    if out.suffix == ".jsonl":
        raise ValueError(f"the report must not replace a run record, got {out}: name an HTML file")


def _short_names(first: Path, second: Path) -> tuple[str, str]:
    """Returns names of two records, without what is common to both."""
    folders = [path.parent if path.name == "run.jsonl" else path for path in (first, second)]
    parts = [list(path.absolute().parts) for path in folders]
    while all(len(path_parts) > 1 for path_parts in parts) and parts[0][-1] == parts[1][-1]:
        for path_parts in parts:
            path_parts.pop()
    name, other = (one_line(path_parts[-1]) for path_parts in parts)
    return (name, other) if name != other else (one_line(str(first)), one_line(str(second)))
