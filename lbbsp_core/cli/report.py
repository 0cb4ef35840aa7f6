"""Command ``lbbsp report``: what a run gained, in one HTML file."""

from __future__ import annotations

from pathlib import Path

import typer

from lbbsp_core.cli import options


@options.one_line_errors
def report(
    run_dirs: list[Path] = typer.Argument(
        metavar="RUN_DIR [RUN_DIR]", help="Folder with run.jsonl, or the file itself; or two."
    ),
    out: Path | None = typer.Option(
        None,
        "--out",
        "-o",
        metavar="FILE",
        help="File to write. Default: report.html in RUN_DIR; of two runs, comparison.html in the "
        "second one.",
    ),
    json_file: options.JsonFile = None,
) -> None:
    """Show what a run gained and where time went, or compare two runs.

    Writes one HTML file, which needs no network: verdict, advice, charts and figures.
    """
    from lbbsp_core.report.html import write_comparison, write_report

    if len(run_dirs) > 2:
        raise ValueError(f"RUN_DIR must be one run, or two to compare, got {len(run_dirs)}")
    console, _ = options.consoles(json_file, run_dirs)
    last = run_dirs[-1]
    name = "report.html" if len(run_dirs) == 1 else "comparison.html"
    path = out or (last if last.is_dir() else last.parent) / name
    if path.is_symlink() and out is None:
        raise ValueError(
            f"{path} is a link to {path.resolve()}: remove it, or name a file by --out"
        )
    options.require_writable_file("--out", path, run_dirs)
    if len(run_dirs) == 1:
        figures = write_report(last, path)
    else:
        figures = write_comparison(run_dirs[0], last, path)
    options.show(console, str(figures["verdict"]))
    options.write_figures(json_file, figures)
    options.show(console, f"report written to {path}")
