"""Command ``lbbsp report``: what a run gained, in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lbbsp_core.cli.options import (
    JsonFile,
    consoles,
    one_line_errors,
    require_writable_file,
    write_figures,
)


@one_line_errors
def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder with run.jsonl, or the file itself.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="File to write. Default: RUN_DIR/report.html."
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Show what a run gained, where time was lost, and what to change.

    Writes one HTML file, which needs no network: verdict, advice, charts and figures.
    """
    from lbbsp_core.report.html import write_report

    console, _ = consoles(json_file)
    path = out or (run_dir if run_dir.is_dir() else run_dir.parent) / "report.html"
    require_writable_file("--out", path)
    require_writable_file("--json", json_file)
    figures = write_report(run_dir, path)
    console.print(figures["verdict"], markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        write_figures(json_file, figures)
    console.print(f"report written to {path}", markup=False, highlight=False, soft_wrap=True)
