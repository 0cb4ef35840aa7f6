"""``lbbsp profile``: batch size -> seconds of a script's step, and where memory ends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lbbsp_core.profiler import BatchSweep, ProfileResult, profile_step

DEFAULT_OUT = Path("profile.json")


def profile(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT.py[:FUNCTION] [-- ARGS]...",
            help="The script that defines step(batch_size), or a FUNCTION of another name.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the profile here: profile.json."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the curve here.")] = None,
    max_batch: Annotated[int, typer.Option(metavar="N", help="Largest batch to try.")] = 8192,
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Steps of each batch at least; their median counts.")
    ] = 5,
    rounds: Annotated[
        int, typer.Option(metavar="N", help="Measure all batches so often; the least time counts.")
    ] = 3,
    longest_step: Annotated[
        float, typer.Option(metavar="SECONDS", help="Try no larger batch after such a step.")
    ] = 5.0,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For loading the script, and for one step.")
    ] = 120.0,
) -> None:
    """Measure seconds by batch size, find the end of memory, and fit all forms of cost.

    The script's step(batch_size) does what a worker does alone in one iteration. It runs in a
    process of its own, which may die of too large a batch.
    """
    out_console, err = Console(), Console(stderr=True)
    try:
        search = BatchSweep(
            max_batch=max_batch, repeats=repeats, rounds=rounds, longest_step=longest_step
        )
        result = _run(err, command, search, timeout)
    except ValueError as error:
        err.print(f"lbbsp profile: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    for note in result.notes:
        err.print(note, style="yellow", markup=False)
    _print(out_console, result)
    for path in {json_file, out} - {None} or {DEFAULT_OUT}:
        assert path is not None
        result.save(path)
        out_console.print(f"profile in {path}", markup=False, highlight=False)
    if plot is not None:
        from lbbsp_core.report.curve import plot_curve

        plot_curve(result, plot)
        out_console.print(f"drawn to {plot}", markup=False, highlight=False)


def _run(err: Console, command: list[str], search: BatchSweep, timeout: float) -> ProfileResult:
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    )
    with bar:
        task = bar.add_task("loading the script", total=search.rounds * len(list(search.batches())))

        def advance(done: str, batch: int, seconds: float | None) -> None:
            took = "out of memory" if seconds is None else f"{1e3 * seconds:.3g} ms"
            bar.update(task, advance=done != "probed", description=f"{batch} samples: {took}")

        return profile_step(
            command[0], search=search, timeout=timeout, arguments=command[1:], progress=advance
        )


def _print(out: Console, result: ProfileResult) -> None:
    points = result.points
    out.print(result.device, markup=False, highlight=False)
    out.print(
        f"{len(points)} batches: {points[0].batch} samples in {1e3 * points[0].seconds:.3g} ms to "
        f"{points[-1].batch} in {1e3 * points[-1].seconds:.3g} ms; "
        + (
            "memory did not end"
            if result.out_of_memory_at is None
            else f"out of memory at {result.out_of_memory_at}"
        ),
        highlight=False,
    )
    table = Table(title="Fits, and their mean relative error on batches left out")
    table.add_column("form")
    table.add_column("parameters", overflow="fold")
    table.add_column("error", justify="right")
    for name, fit in result.fits.items():
        error = "" if fit.cv_error is None else f"{fit.cv_error:.2%}"
        style = "bold" if name == result.best else None
        table.add_row(f"{name} (best)" if style else name, str(fit), error, style=style)
    out.print(table)
