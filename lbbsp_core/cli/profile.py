"""Command ``lbbsp profile``: measures seconds per step by batch size, and the memory limit."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from lbbsp_core.cli import options
from lbbsp_core.cli.progress import countdown
from lbbsp_core.profiler import BatchSweep, ProfileResult, profile_step
from lbbsp_core.report.wording import duration, percent

DEFAULT_OUT = Path("profile.json")


@options.one_line_errors
def profile(
    command: list[str] = typer.Argument(
        metavar="SCRIPT.py[:FUNCTION] [-- ARGS]...",
        help="Script that defines step(batch_size), or FUNCTION(batch_size) if given.",
    ),
    out: Path | None = typer.Option(
        None, "--out", "-o", metavar="FILE", help="Write the profile here. Default: profile.json."
    ),
    json_file: options.JsonFile = None,
    plot: Path | None = typer.Option(
        None, metavar="FILE", help="Plot the curve to this HTML file."
    ),
    max_batch: int = typer.Option(8192, metavar="SAMPLES", help="Largest batch size to try."),
    repeats: int = typer.Option(
        5, metavar="STEPS", help="Minimum number of timed steps per batch; the median is kept."
    ),
    rounds: int = typer.Option(
        3, metavar="TIMES", help="Measure all batches this many times and keep the smallest median."
    ),
    longest_step: float = typer.Option(
        5.0, metavar="SECONDS", help="Try no larger batch once a step has taken longer than this."
    ),
    timeout: float = typer.Option(
        120.0, metavar="SECONDS", help="Time limit for loading the script, and for each step."
    ),
) -> None:
    """Measure seconds per step by batch size.

    Also finds the memory limit, and fits all cost forms to the measured points.
    The script's step(batch_size) does the local work of a worker in one iteration. It runs in a
    child process, which may be killed when a batch is too large for the memory.
    """
    script = [command[0], command[0].rpartition(":")[0]]
    out_console, err = options.consoles(json_file, script)
    if out is None and json_file is None:
        out = DEFAULT_OUT
    options.require_writable_file("--out", out, script)
    options.require_picture("--plot", plot, script)
    sweep = BatchSweep(
        max_batch=max_batch, repeats=repeats, rounds=rounds, longest_step=longest_step
    )
    total = rounds * len(list(sweep.batches()))
    with countdown(err, total, "loading the script") as advance:

        def show(activity: str, batch: int, seconds: float | None) -> None:
            result = "out of memory" if seconds is None else duration(seconds)
            advance(f"{batch} samples:", result, activity != "probed")

        result = profile_step(
            command[0], sweep=sweep, timeout=timeout, arguments=command[1:], progress=show
        )
    for text in result.notes:
        options.note(err, text)
    _print(out_console, result)
    if json_file == options.STDOUT:
        options.write_figures(options.STDOUT, result.figures())
    for path in dict.fromkeys((json_file, out)):
        if path is not None and path != options.STDOUT:
            result.save(path)
            options.show(out_console, f"profile written to {path}")
    if plot is not None:
        from lbbsp_core.report.pictures import draw_profile

        draw_profile(result, plot)
        options.show(out_console, f"plot written to {plot}")


def _print(out: Console, result: ProfileResult) -> None:
    points = result.points
    options.show(out, result.device)
    limit = result.out_of_memory_at
    memory = "all batches fit in memory" if limit is None else f"out of memory at {limit}"
    out.print(
        f"{len(points)} batches: {points[0].batch} samples in {duration(points[0].seconds)} to "
        f"{points[-1].batch} in {duration(points[-1].seconds)}; {memory}",
        highlight=False,
    )
    title = "Fitted cost forms, and their mean relative error on left-out batches"
    table = options.FiguresTable(("form", "parameters"), ("error",), title=title)
    for name, fit in result.fits.items():
        error = "" if fit.cv_error is None else percent(fit.cv_error, 2)
        style = "bold" if name == result.best else None
        table.add_row(f"{name} (best)" if style else name, str(fit), error, style=style)
    out.print(table)
