"""Command ``lbbsp trace``: a run as a file for trace viewers."""

from __future__ import annotations

from pathlib import Path

import typer

from lbbsp_core.cli import options


@options.one_line_errors
def trace(
    run_dir: Path = typer.Argument(
        metavar="RUN_DIR", help="Folder with run.jsonl, or the file itself."
    ),
    out: Path | None = typer.Option(
        None, "--out", "-o", metavar="FILE", help="File to write. Default: RUN_DIR/trace.json."
    ),
) -> None:
    """Write the timeline of a run for Perfetto or Chrome.

    Open the file at https://ui.perfetto.dev or chrome://tracing: a track for each worker shows
    when it computed, waited and communicated; counters show batch sizes and driving factors.
    """
    from lbbsp_core.report.trace_events import write_trace
    from lbbsp_core.runtime.record.named import read_named_run

    path = out or (run_dir if run_dir.is_dir() else run_dir.parent) / "trace.json"
    options.require_writable_file("--out", path, [run_dir])
    count = write_trace(read_named_run(run_dir), path)
    options.show(options.consoles(None)[0], f"trace of {count} events written to {path}")
