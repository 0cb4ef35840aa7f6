"""``lbbsp demo``: one training on unequal workers, as plain BSP and balanced, side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lbbsp_core.cli import options
from lbbsp_core.demo import comparison
from lbbsp_core.demo.comparison import FinishedRun, Plan, Training
from lbbsp_core.report.live import LiveRun
from lbbsp_core.report.summary import Summary
from lbbsp_core.report.wording import between, compared, duration, percent, rate
from lbbsp_core.runtime.record.figures import NOTICEABLE
from lbbsp_core.validate import require_integer, require_known

_EXPLANATION = (
    "Efficiency: time of the ideal step, whose batches fit the speeds / time of a step. Computing "
    "in the ideal step: the same without its communication, which counts as lost time, too."
)


class Progress:
    """Progress of a run on one line, for `rich.live.Live`: steps, time of a step, batch sizes."""

    def __init__(self, title: str, steps: int, record: Path) -> None:
        self._title = title
        self._steps = steps
        self._run = LiveRun(record)

    def __rich__(self) -> Table:
        """Renders the current state."""
        last = self._run.last_step if self._run.read() else None
        done, state = 0, Text("starting the workers ...", style="dim")
        if last is not None:
            done, sizes = last.step + 1, " + ".join(map(str, last.sizes))
            text = f"step {done}/{self._steps} {last.wall_seconds * 1e3:5.0f} ms  batches {sizes}"
            state = Text(text, no_wrap=True, overflow="ellipsis")
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=self._steps, completed=done, width=16)
        row.add_row(Text(f"{self._title:<9}", style="bold"), bar, state)
        return row


@options.one_line_errors
def demo(
    framework: str = typer.Option(
        "tensorflow", metavar="|".join(comparison.FRAMEWORKS), help="Framework to train with."
    ),
    workers: int = typer.Option(3, metavar="WORKERS", help="Number of workers, 2 or more."),
    speeds: str | None = typer.Option(
        None, metavar="1,1,0.35", help="Speed of each worker. By default only the last one is slow."
    ),
    steps: int = typer.Option(80, metavar="STEPS", help="Number of steps of each run, 20 or more."),
    run_dir: Path = typer.Option(
        "runs/demo", metavar="DIR", parser=options.folder, help="Folder for all results."
    ),
    json_file: options.JsonFile = None,
) -> None:
    """Train with plain BSP and with LB-BSP, and compare.

    Both runs train on handwritten digits with the same unequal workers and the same samples.
    """
    console, _ = options.consoles(json_file)
    relative_speeds = _relative_speeds(require_integer("workers", workers, 2), speeds)
    require_known("framework", framework, comparison.FRAMEWORKS)
    plan = Plan(framework, relative_speeds, require_integer("steps", steps, 20), run_dir)
    listed = ", ".join(f"{speed:g}" for speed in relative_speeds)
    options.require_writable_folder("--run-dir", run_dir)
    try:
        comparison.require_packages(framework)
        console.print(
            f"Trains on handwritten digits with {workers} workers of relative speeds {listed}, "
            "twice: on the same samples, in the same order, from the same initial weights."
        )
        bsp = _train(plan, comparison.PLAIN, console)
        lbbsp = _train(plan, comparison.BALANCED, console)
    except comparison.RunFailedError as error:
        typer.echo(f"lbbsp demo: {error}", err=True)
        raise typer.Exit(error.status) from None
    figures = comparison.write_results(plan, bsp, lbbsp)
    console.print(_table(figures))
    if text := comparison.disturbance(relative_speeds, figures):
        console.print(Text(text, "bold"))
    console.print(f"Picture: {run_dir / 'demo.html'}   Figures: {run_dir / 'summary.json'}")
    console.print(f"Report of the balanced run: open {run_dir / 'report.html'}", markup=False)
    options.write_figures(json_file, figures)


def _relative_speeds(workers: int, speeds: str | None) -> list[float]:
    if speeds is None:
        return [1.0] * (workers - 1) + [comparison.SLOW_WORKER]
    relative_speeds = options.parse_speeds(speeds)
    if len(relative_speeds) != workers:
        raise ValueError(
            f"--speeds must hold one speed for each of the {workers} workers, got "
            f"{len(relative_speeds)} ({speeds}): change it, or give --workers "
            f"{len(relative_speeds)}"
        )
    return relative_speeds


def _train(plan: Plan, training: Training, console: Console) -> FinishedRun:
    """Runs one of the two trainings and shows its progress."""
    comparison.prepare(plan, training)
    progress = Progress(training.title, plan.steps, plan.folder(training))
    try:
        with Live(progress, console=console, refresh_per_second=4):
            return comparison.train(plan, training)
    finally:
        if not console.is_terminal:
            console.line()  # rich leaves the last line open there


def _table(figures: Summary) -> Table:
    bsp, lbbsp = figures["bsp"], figures["lbbsp"]
    gain = figures["speedup"]
    title = f"LB-BSP trains {compared('plain BSP', gain)}"
    style = "bold green" if gain > 1 else "bold"
    table = options.FiguresTable(("",), ("plain BSP", "LB-BSP"), title=title, title_style=style)
    hides = max(bsp["hidden_communication"], lbbsp["hidden_communication"]) >= NOTICEABLE
    share = partial(percent, digits=1)
    estimated = between(lbbsp["estimated_speedup"], lbbsp["estimated_speedup_at_most"])
    rows: list[tuple[str, str, Callable[[float], str]]] = [
        ("step", "step_seconds", duration),
        ("throughput", "samples_per_second", rate),
        ("waiting for other workers", "waiting", share),
        ("waiting and communication", "waiting_and_communication", share),
        *[("hidden communication", "hidden_communication", share)] * hides,
        ("held-out accuracy", "accuracy", partial(percent, digits=2)),
    ]
    for name, key, form in rows:
        table.add_row(name, *(form(run[key]) for run in (bsp, lbbsp)))
    table.caption = _EXPLANATION
    table.caption_justify = "left"
    table.add_section()
    for name, text in (
        ("speed-up, measured", f"{figures['speedup']:.2f}"),
        ("speed-up, estimated from the LB-BSP run", estimated),
        ("ideal speed-up", f"{figures['ideal_speedup']:.2f}"),
        ("efficiency", share(figures["efficiency"])),
        ("computing in the ideal step", share(figures["ideal_busy_share"])),
        ("largest weight difference", f"{figures['max_weight_difference']:.1e}"),
        ("largest weight", f"{figures['max_abs_weight']:.2f}"),
    ):
        table.add_row(name, "", text)
    return table
