"""Command ``lbbsp report``: what a run gained, in one HTML file."""

from __future__ import annotations

from pathlib import Path

import typer

from lbbsp_core.cli import options


@options.one_line_errors
def report(
    run_dir: Path = typer.Argument(
        metavar="RUN_DIR", help="Folder with run.jsonl, or the file itself."
    ),
    out: Path | None = typer.Option(
        None, "--out", "-o", metavar="FILE", help="File to write. Default: RUN_DIR/report.html."
    ),
    json_file: options.JsonFile = None,
) -> None:
    """Show what a run gained, where time was lost, and what to change.

    Writes one HTML file, which needs no network: verdict, advice, charts and figures.
    """
    from lbbsp_core.report.html import write_report

    inputs = [run_dir, run_dir / "run.jsonl"]
    console, _ = options.consoles(json_file, inputs)
    path = out or (run_dir if run_dir.is_dir() else run_dir.parent) / "report.html"
    options.require_writable_file("--out", path, inputs)
    figures = write_report(run_dir, path)
    options.show(console, str(figures["verdict"]))
    options.write_figures(json_file, figures)
    options.show(console, f"report written to {path}")
