"""Command ``lbbsp watch``: a view of a running job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lbbsp_core.cli import options
from lbbsp_core.report.live import LiveRun, View, WorkerView
from lbbsp_core.report.page import duration, percent
from lbbsp_core.runtime.record.figures import RECENT

_LATE_SECONDS: Final = 10.0
"""Time without a step after which the view says so in colour."""

_BALANCED: Final = 0.02
"""Share of waiting up to which workers count as balanced."""

_OTHER_LINES: Final = 10
"""Lines of a view beside those of workers, with room for sentences that are wrapped."""


@options.one_line_errors
def watch(
    run_dir: Path = typer.Argument(
        metavar="RUN_DIR", help="Folder of the run, or its .jsonl file."
    ),
    once: bool = typer.Option(
        False, "--once", help="Print one view and end, as without a terminal."
    ),
    json_file: options.JsonFile = None,
    interval: float = typer.Option(1.0, min=0.1, metavar="SECONDS", help="Time between two views."),
    timeout: float | None = typer.Option(
        None,
        min=0,
        metavar="SECONDS",
        help="End if the run has not started after this time. By default, wait for it, but "
        "not with --once.",
    ),
) -> None:
    """Show a running job: how busy each worker is, and who waits for whom.

    It reads the record that the run writes (record=, or lbbsp launch --run-dir), from any machine
    that can read the file. Forecast is the predicted over the measured time. It ends at Ctrl-C.
    """
    out, err = options.consoles(json_file)
    once = once or json_file == options.STDOUT or not out.is_terminal
    run = LiveRun(run_dir)
    limit = 0.0 if once and timeout is None else timeout
    try:
        _await_start(run, err, limit, interval)
        if once:
            out.print(render(run.view()))
        else:
            follow(run, out, interval)
    except KeyboardInterrupt:
        pass
    if run.header is not None:
        options.write_figures(json_file, run.view().to_json())


def follow(
    run: LiveRun, console: Console, interval: float, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Shows a run that has started until KeyboardInterrupt, which it raises."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            if run.read():  # not while a record is being replaced
                rows = max(console.height - _OTHER_LINES, 1)
                live.update(render(run.view(), rows), refresh=True)
            sleep(interval)


def render(view: View, rows: int | None = None) -> Group:
    """Returns a view for the terminal, with at most `rows` workers: the slowest ones."""
    workers, rest = view.workers, ""
    if rows is not None and len(workers) > rows:
        by_time = sorted(workers, key=lambda worker: worker.busy_seconds or 0.0, reverse=True)
        workers = tuple(by_time[:rows])
        rest = f"and {len(by_time) - rows} more workers, none of which is slower"
    state = Text(_state(view))
    if view.age_seconds is not None:
        state.append("   ").append(*_progress(view, view.age_seconds))
    sentences = [Text(each) for each in (_who_waits(view), *_figures(view)) if each]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("#", "host", "device"):
        table.add_column(name, overflow="fold", min_width=len(name))
    for name in ("batch", "busy", "waiting", "pushes" if view.is_asynchronous else "forecast"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in workers:
        cells = map(Text, _cells(worker))
        table.add_row(*cells, style="bold" if worker.rank == view.slowest else "")
    return Group(state, *sentences, table, rest)


def _await_start(run: LiveRun, err: Console, limit: float | None, interval: float) -> None:
    """Waits until the run has started."""
    if run.read():
        return
    started = time.monotonic()
    if limit != 0:
        err.print(Text(f"waiting for the run to start: {run.path} has no header yet"))
    while not run.read():
        waited = time.monotonic() - started
        if limit is not None and waited >= limit:
            raise ValueError(
                f"{run.path} must be the record of a run that has started, got none in {limit:g} "
                "s: pass the folder given to lbbsp launch --run-dir or to record="
            )
        time.sleep(interval if limit is None else min(interval, limit - waited))


def _cells(worker: WorkerView) -> tuple[str, ...]:
    last = worker.pushes if worker.prediction is None else f"{worker.prediction:.2f}"
    share = "" if worker.waiting is None else f" {worker.waiting:4.0%}"
    return (
        str(worker.rank),
        worker.host,
        worker.device,
        "-" if worker.batch_size is None else str(worker.batch_size),
        _duration(worker.busy_seconds),
        _duration(worker.waiting_seconds) + share,
        "-" if last is None else str(last),
    )


def _state(view: View) -> str:
    """Returns the line about the run as a whole."""
    unit, units = ("push", "pushes") if view.is_asynchronous else ("step", "steps")
    parts = [view.framework, f"no {unit} yet" if view.step is None else f"{unit} {view.step}"]
    if view.steps_per_second is not None and view.samples_per_second is not None:
        parts.append(f"{view.steps_per_second:.3g} {units}/s")
        parts.append(f"{view.samples_per_second:.4g} samples/s")
    if view.elapsed_seconds is not None:
        parts.append(f"{duration(view.elapsed_seconds)} since the start")
    if view.restarts:
        parts.append(f"{view.restarts} restart{'s' * (view.restarts > 1)}")
    if view.unreadable:
        parts.append(f"{view.unreadable} unreadable line{'s' * (view.unreadable > 1)}")
    return ", ".join(parts)


def _progress(view: View, age_seconds: float) -> tuple[str, str]:
    """Returns whether the run makes progress, and the style in which to say so."""
    unit = "push" if view.is_asynchronous else "step"
    if view.stop:
        return f"stopped after this {unit}: {view.stop}", "bold"
    if age_seconds >= _LATE_SECONDS:
        return f"no {unit} for {duration(age_seconds)}: ended, or stuck", "bold yellow"
    return "running", "green"


def _who_waits(view: View) -> str:
    """Returns a sentence about who waits for whom; none where no worker need wait for others."""
    if view.is_asynchronous:
        return ""
    if view.recent is None:
        return "Nothing is known about waiting yet."
    longest = max(worker.waiting or 0.0 for worker in view.workers)
    if longest <= _BALANCED:
        return f"Balanced: no worker waits for more than {_BALANCED:.0%} of a step."
    share = f"up to {longest:.0%} of a step."
    if view.slowest is None:
        return f"Workers wait for each other in turn: {share}"
    slowest = view.workers[view.slowest]
    name = f"worker {slowest.rank}" + (f" ({slowest.host})" if slowest.host else "")
    return f"The others wait for {name}: {share}"


def _figures(view: View) -> Iterator[str]:
    """Yields the figures of the run, each line with its window."""
    windows = ("All steps so far", view.so_far), (f"The last {RECENT} regular steps", view.recent)
    for window, figures in windows:
        if figures is not None:
            yield (
                f"{window}: waiting for other workers {percent(figures.waiting, 1)}, waiting and "
                f"communication {percent(figures.waiting_and_communication, 1)}, estimated "
                f"speed-up over even batches {figures.speedup:.2f}."
            )


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
