"""Command ``lbbsp watch``: a view of a running job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from operator import itemgetter
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
from lbbsp_core.report.wording import compared, duration, grouped, percent, rate
from lbbsp_core.runtime.record.events import FAILED, FINISHED, INTERRUPTED
from lbbsp_core.runtime.record.figures import RECENT
from lbbsp_core.validate import require_nonnegative

_LATE_SECONDS: Final = 10.0
"""Time without a step after which the view says so in colour."""

_STATUS: Final = {FAILED: 1, INTERRUPTED: 3}
"""Exit statuses of ends; 2 is that of errors."""

_CAUSES: Final = 3
"""Workers of which a view says why they are slow."""

_BALANCED: Final = 0.02
"""Share of waiting up to which workers count as balanced."""

_OTHER_LINES: Final = 14
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
    interval: float = typer.Option(1.0, metavar="SECONDS", help="Time between two views."),
    wait: float = typer.Option(
        60.0,
        metavar="SECONDS",
        help="Time to wait for a restart after the run has failed or was interrupted.",
    ),
    timeout: float | None = typer.Option(
        None,
        metavar="SECONDS",
        help="End if the run has not started after this time. By default, wait for it, but "
        "not with --once.",
    ),
) -> None:
    """Show a running job: how busy workers are and who waits for whom.

    It reads the record that the run writes (record=, or lbbsp launch --run-dir), from any machine
    that can read the file. Forecast is the predicted over the measured time. It ends with the run:
    the exit status is 1 if the run has failed, 3 if it was interrupted, else 0, also at Ctrl-C.
    """
    out, err = options.consoles(json_file, [run_dir])
    if not 0.1 <= interval <= 3600:
        raise ValueError(f"interval must be from 0.1 to 3600 seconds, got {interval:g}")
    require_nonnegative("wait", wait)
    if timeout is not None:
        require_nonnegative("timeout", timeout)
    once = once or json_file == options.STDOUT or not out.is_terminal
    run = LiveRun(run_dir)
    limit = 0.0 if once and timeout is None else timeout
    try:
        _await_start(run, err, limit, interval)
        if once:
            out.print(render(run.view()))
        else:
            follow(run, out, interval, wait)
    except KeyboardInterrupt:
        pass
    if run.header is not None:
        view = run.view()
        options.write_figures(json_file, view.to_json())
        raise typer.Exit(_STATUS.get(view.end or "", 0))


def follow(
    run: LiveRun,
    console: Console,
    interval: float,
    wait: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Shows a run that has started until it ends, and if not well, until `wait` seconds later."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            if run.read():  # not while a record is being replaced
                view, rows = run.view(), max(console.height - _OTHER_LINES, 1)
                left = 0.0 if view.end == FINISHED else wait - (view.age_seconds or 0.0)
                is_over = view.end is not None and left <= 0
                live.update(render(view, rows, 0.0 if is_over else left), refresh=True)
                if is_over:
                    return
            sleep(interval)


def render(view: View, rows: int | None = None, wait: float = 0.0) -> Group:
    """Returns a view for the terminal, with at most `rows` workers: the slowest ones.

    After an end, it says that a restart is awaited for `wait` seconds.
    """
    workers, footer = view.workers, ""
    if rows is not None and len(workers) > rows:
        by_time = sorted(workers, key=lambda worker: worker.busy_seconds or 0.0, reverse=True)
        workers = tuple(by_time[:rows])
        footer = f"and {len(by_time) - rows} more workers, none of which is slower"
    state = Text(f"{view.framework}: ", "bold").append(*_progress(view, wait))
    lines = (_pace(view), _who_waits(view), *_causes(view), *_figures(view))
    sentences = [Text(line) for line in lines if line]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("#", "host", "device"):
        table.add_column(name, overflow="fold", min_width=len(name))
    for name in ("batch", "busy", "waiting", "pushes" if view.is_asynchronous else "forecast"):
        table.add_column(name, justify="right", no_wrap=True)
    recorded = dict.fromkeys(name for worker in workers for name in worker.values)
    for name in recorded:
        table.add_column(Text(name), justify="right")
    for worker in workers:
        values = [worker.values.get(name) for name in recorded]
        texts = ("-" if value is None else grouped(value) for value in values)
        cells = map(Text, (*_cells(worker), *texts))
        table.add_row(*cells, style="bold" if worker.rank == view.slowest else "")
    return Group(state, *sentences, table, footer)


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
                "s: pass the folder given to lbbsp launch --run-dir or to record=, and "
                "a longer --timeout if it is only starting"
            )
        time.sleep(interval if limit is None else min(interval, limit - waited))


def _cells(worker: WorkerView) -> tuple[str, ...]:
    last = worker.pushes if worker.prediction is None else f"{worker.prediction:.2f}"
    share = "" if worker.waiting is None else f" {percent(worker.waiting):>5}"
    return (
        str(worker.rank),
        worker.host,
        worker.device,
        "-" if worker.batch_size is None else str(worker.batch_size),
        _duration(worker.busy_seconds),
        _duration(worker.waiting_seconds) + share,
        "-" if last is None else str(last),
    )


def _progress(view: View, wait: float) -> tuple[str, str]:
    """Returns how far the run is and whether it makes progress, and the style to say so."""
    unit = "push" if view.is_asynchronous else "step"
    done = f"no {unit} yet" if view.step is None else f"{unit} {view.step}"
    planned, age = view.planned_steps, view.age_seconds
    if view.step is not None and planned:
        done = f"{view.step + 1} of {planned} steps ({percent((view.step + 1) / planned)})"
    if view.stop:
        done += f", stopped after this {unit}: {view.stop}"
    ago = "" if age is None else f" {_seconds(age)} ago"
    if view.end is not None:
        style = "bold green" if view.end == FINISHED else "bold red"
        restart = f"; a restart is awaited for {_seconds(wait)}" if wait > 0 else ""
        return f"{view.end}{ago}, {done}{restart}", style
    if view.stop:
        return done, "bold"
    if age is not None and age >= _LATE_SECONDS:
        if view.remaining_seconds == 0:
            return f"{done}, trained{ago}, but the script has not ended", "green"
        if view.step is None:
            return f"{done}, started{ago}", "bold yellow"
        return f"{done}, no {unit} for {_seconds(age)}: ended, or stuck", "bold yellow"
    left = view.remaining_seconds
    return f"{done}, running" + (f", {_seconds(left)} left" if left else ""), "green"


def _pace(view: View) -> str:
    """Returns the line about the run as a whole."""
    unit = "pushes" if view.is_asynchronous else "steps"
    parts = []
    if view.steps_per_second is not None and view.samples_per_second is not None:
        parts.append(f"{grouped(view.steps_per_second)} {unit}/s")
        parts.append(rate(view.samples_per_second))
    if view.elapsed_seconds is not None:
        parts.append(f"{_seconds(view.elapsed_seconds)} since the start")
    if view.restarts:
        parts.append(f"{view.restarts} restart{'s' * (view.restarts > 1)}")
    if view.unreadable:
        parts.append(f"{view.unreadable} unreadable line{'s' * (view.unreadable > 1)}")
    return ", ".join(parts)


def _causes(view: View) -> Iterator[str]:
    """Yields sentences about why workers are slow, of the slowest ones with a known cause."""
    slow = [(worker.speed, worker) for worker in view.workers if worker.causes and worker.speed]
    slow.sort(key=itemgetter(0))
    for speed, worker in slow[:_CAUSES]:
        share, clauses = percent(speed), " and ".join(worker.causes)
        yield f"W{_name(worker)[1:]} has {share} of the speed of the fastest one: {clauses}."


def _name(worker: WorkerView) -> str:
    return f"worker {worker.rank}" + (f" ({worker.host})" if worker.host else "")


def _who_waits(view: View) -> str:
    """Returns a sentence about who waits for whom; none where no worker need wait for others."""
    if view.is_asynchronous:
        return ""
    if view.recent is None:
        return "Nothing is known about waiting yet."
    longest = max(worker.waiting or 0.0 for worker in view.workers)
    if longest <= _BALANCED:
        return f"Balanced: no worker waits for more than {percent(_BALANCED)} of a step."
    share = f"up to {percent(longest)} of a step."
    if view.slowest is None:
        return f"Workers wait for each other in turn: {share}"
    return f"The others wait for {_name(view.workers[view.slowest])}: {share}"


def _figures(view: View) -> Iterator[str]:
    """Yields the figures of the run, each line with its window."""
    windows = ("All steps so far", view.so_far), (f"The last {RECENT} regular steps", view.recent)
    for window, figures in windows:
        if figures is not None:
            gain = compared("with even batches", figures.speedup, figures.speedup_at_most)
            hidden = f"hidden communication {percent(figures.hidden_communication, 1)}, "
            yield (
                f"{window}: waiting for other workers {percent(figures.waiting, 1)}, waiting and "
                f"communication {percent(figures.waiting_and_communication, 1)}, "
                f"{hidden * figures.hides}{gain} (estimated)."
            )


def _seconds(seconds: float) -> str:
    """Returns a time in whole seconds."""
    return duration(max(1, round(seconds)))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
