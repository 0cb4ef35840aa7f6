"""``lbbsp demo``: one training on unequal workers, as plain BSP and balanced, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from lbbsp_core.cli.options import parse_speeds
from lbbsp_core.cli.progress import Progress
from lbbsp_core.launch import launch
from lbbsp_core.report.picture import draw_comparison
from lbbsp_core.report.summary import Comparison, Outcome, summarise
from lbbsp_core.runtime.record import Run, read_run

SLOW_WORKER: Final = 0.35
TIMEOUT_SECONDS: Final = 900.0


class Framework(NamedTuple):
    """What the demo of a framework needs: its module, our plugin, and how to install them."""

    module: str
    plugin: str
    extra: str


class Plan(NamedTuple):
    """What both runs have in common."""

    framework: str
    speeds: Sequence[float]
    steps: int
    run_dir: Path


class Finished(NamedTuple):
    """A run that has ended well."""

    run: Run
    outcome: Outcome


FRAMEWORKS: Final[Mapping[str, Framework]] = MappingProxyType(
    {
        "tensorflow": Framework("tensorflow", "lbbsp_tf", "tf-cpu"),
        "mxnet": Framework("mxnet", "lbbsp_mx", "mx"),
    }
)


def demo(
    framework: Annotated[
        str, typer.Option(help="tensorflow or mxnet: which plugin to show.")
    ] = "tensorflow",
    workers: Annotated[int, typer.Option(min=2, help="How many workers.")] = 3,
    speeds: Annotated[
        str | None,
        typer.Option(metavar="1,1,0.35", help="Relative speeds; by default the last one is slow."),
    ] = None,
    steps: Annotated[int, typer.Option(min=20, help="Steps of each run.")] = 110,
    run_dir: Annotated[Path, typer.Option(help="Folder for all that is written.")] = Path(
        "runs/demo"
    ),
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here, too.")
    ] = None,
) -> None:
    """Train on unequal workers, as plain BSP and balanced, and compare."""
    console = Console()
    _require(framework)
    relative = _relative_speeds(workers, speeds)
    plan = Plan(framework, relative, steps, run_dir)
    console.print(
        f"Handwritten digits on {workers} workers of speeds {', '.join(f'{v:g}' for v in relative)}"
        ", twice: the same samples, order and initial weights."
    )
    try:
        bsp = _train(plan, workers, "bsp", "plain BSP", "even", console)
        lbbsp = _train(plan, workers, "lbbsp", "LB-BSP", "lbbsp", console)
    except ValueError as error:
        raise _failed(str(error), 2) from None
    _report(plan, bsp, lbbsp, json_file, console)


def _relative_speeds(workers: int, speeds: str | None) -> list[float]:
    if speeds is None:
        return [1.0] * (workers - 1) + [SLOW_WORKER]
    relative = parse_speeds(speeds)
    if len(relative) != workers:
        raise typer.BadParameter(
            f"must hold one speed for each of the {workers} workers, got {len(relative)} "
            f"({speeds}): change it, or give --workers {len(relative)}",
            param_hint="--speeds",
        )
    return relative


def _require(framework: str) -> None:
    """Ends the command, with the cure, if something it needs is not installed."""
    if framework not in FRAMEWORKS:
        raise typer.BadParameter(
            f"must be one of {', '.join(FRAMEWORKS)}, got {framework!r}: choose one of these",
            param_hint="--framework",
        )
    wanted = FRAMEWORKS[framework]
    for module, extra in (
        (wanted.module, wanted.extra),
        (wanted.plugin, wanted.extra),
        ("sklearn", "demo"),
        ("matplotlib", "demo"),
    ):
        if find_spec(module) is None:
            raise _failed(f"{module} is not installed: pip install 'lbbsp[{extra}]'", 2)


def _train(
    plan: Plan, workers: int, folder: str, name: str, policy: str, console: Console
) -> Finished:
    """One of the two runs, with its progress shown; ends the command if it fails."""
    run_dir = (plan.run_dir / folder).absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    record, final = run_dir / "run.jsonl", run_dir / "final.npz"
    for stale in (record, final):
        stale.unlink(missing_ok=True)
    module = f"{FRAMEWORKS[plan.framework].plugin}.demo"
    options = {"--policy": policy, "--steps": str(plan.steps), "--run-dir": str(run_dir)}
    progress = Progress(name, plan.steps, record)
    log_path = run_dir / "output.log"
    with (
        log_path.open("w", encoding="utf-8", buffering=1) as log,
        Live(progress, console=console, refresh_per_second=4),
    ):
        status = launch(
            ["-m", module, *(word for pair in options.items() for word in pair)],
            workers=workers,
            speeds=plan.speeds,
            run_dir=run_dir,
            timeout=TIMEOUT_SECONDS,
            framework=plan.framework,
            output=lambda rank, line: print(f"[{rank}] {line}", file=log),
        )
    if not console.is_terminal:
        console.line()  # there rich leaves the last line open
    if status:
        raise _failed(f"the {name} run failed (all output is in {log_path})", status)
    return Finished(read_run(record), _outcome(final))


def _outcome(path: Path) -> Outcome:
    with np.load(path) as saved:
        names = [name for name in saved.files if name != "accuracy"]
        return Outcome(float(saved["accuracy"]), [saved[name] for name in names])


def _report(
    plan: Plan, bsp: Finished, lbbsp: Finished, json_file: Path | None, console: Console
) -> None:
    """Figures to the terminal and to files, and the picture."""
    comparison = Comparison(summarise(bsp.run), summarise(lbbsp.run))
    figures = comparison.figures(bsp.outcome, lbbsp.outcome)
    text = json.dumps(figures, indent=2, allow_nan=False) + "\n"
    for path in (plan.run_dir / "summary.json", json_file):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    picture = plan.run_dir / "demo.png"
    note = _what_was_learned(figures)
    draw_comparison(bsp.run, lbbsp.run, picture, speeds=plan.speeds, note=note)
    console.print(_table(figures))
    console.print(f"The picture: {picture}   The figures: {plan.run_dir / 'summary.json'}")


def _what_was_learned(figures: Mapping[str, Any]) -> str:
    before, after = (figures[run]["accuracy"] for run in ("bsp", "lbbsp"))
    return (
        f"Same samples in the same order: held-out accuracy {before:.1%} with plain BSP, "
        f"{after:.1%} with LB-BSP."
    )


def _table(figures: Mapping[str, Any]) -> Table:
    bsp, lbbsp = figures["bsp"], figures["lbbsp"]
    table = Table(title=f"{figures['speedup']:.2f} x faster", title_style="bold green")
    table.add_column("")
    table.add_column("plain BSP", justify="right")
    table.add_column("LB-BSP", justify="right")
    for name, key, form in (
        ("step", "step_seconds", lambda seconds: f"{seconds * 1e3:.0f} ms"),
        ("throughput", "samples_per_second", lambda speed: f"{speed:.0f} samples/s"),
        ("time spent waiting", "waiting_share", "{:.1%}".format),
        ("held-out accuracy", "accuracy", "{:.2%}".format),
    ):
        table.add_row(name, form(bsp[key]), form(lbbsp[key]))
    table.add_section()
    for name, value in (
        ("speed-up", f"{figures['speedup']:.2f}"),
        ("ideal speed-up", f"{figures['ideal_speedup']:.2f}"),
        ("efficiency", f"{figures['efficiency']:.1%}"),
        ("efficiency without communication", f"{figures['efficiency_without_communication']:.1%}"),
        ("largest weight difference", f"{figures['max_weight_difference']:.1e}"),
        ("largest weight", f"{figures['max_abs_weight']:.2f}"),
    ):
        table.add_row(name, "", value)
    return table


def _failed(message: str, status: int) -> typer.Exit:
    typer.echo(f"lbbsp demo: {message}", err=True)
    return typer.Exit(status)
