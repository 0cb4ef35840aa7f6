"""`lbbsp simulate`: policies, predictors and synchronisers in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lbbsp_core.cli.progress import countdown
from lbbsp_core.sim import (
    MODELS,
    PRESETS,
    FixedTime,
    ReplayedCluster,
    Scenario,
    SimConfig,
    Task,
    Trace,
    cluster_from_run,
    digits,
    load_scenario,
    names_of,
    read_trace,
    replay_trace,
)
from lbbsp_core.sim.backtest import DEFAULT, contenders
from lbbsp_core.sim.experiment import (
    POLICIES,
    STEPS_PER_EPOCH,
    Experiment,
    LearningTarget,
    Result,
    Row,
    arena_of,
    chosen_runs,
    figures,
    run_experiments,
)
from lbbsp_core.validate import require_known

_ALL = "all"
_QUICK = "ema0.5"
"""Default for invented clusters, which may be large: it runs in arrays."""


def simulate(
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[TRACE]...", help="More trace files.")
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="TRACE...", help="CSV trace files of two workers or more."),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE.toml", help=f"An invented cluster: {', '.join(PRESETS)}, or a file."
        ),
    ] = None,
    from_run: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN_DIR", help="What schemes would have made of a plain BSP run."),
    ] = None,
    policies: Annotated[
        str, typer.Option(metavar="A,B", help=f"all, or of {', '.join(POLICIES)}.")
    ] = _ALL,
    predictors: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="all, or names that lbbsp evaluate shows. Default: "
            f"{DEFAULT}; {_QUICK} for scenarios.",
        ),
    ] = None,
    sync: Annotated[
        str,
        typer.Option(metavar="A,B", help="bsp, ssp:3, asp, dssp:3:15, elasticbsp:15."),
    ] = "bsp",
    workers: Annotated[
        str | None,
        typer.Option(metavar="N,M", help="Numbers of workers; of a trace, the first ones."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Of a scenario, in global batches.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of a scenario.")] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="X", help="Default: as recorded, or 64 a worker.")
    ] = None,
    lag: Annotated[
        int, typer.Option(min=1, help="A plan decided after step k serves step k + LAG.")
    ] = 1,
    steps_per_epoch: Annotated[
        int | None, typer.Option(min=1, help="For dbs, which plans once an epoch.")
    ] = None,
    communication: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="Of each step, after the slowest."),
    ] = None,
    target_accuracy: Annotated[
        float | None,
        typer.Option(metavar="A", help="Learn the digits along, and say when they are learned."),
    ] = None,
    model: Annotated[str, typer.Option(help="softmax or mlp, to learn with.")] = "softmax",
    learning_rate: Annotated[float, typer.Option(help="Of an update from X samples.")] = 0.5,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the efficiencies here.")
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Draw timelines, times of updates, accuracy and scaling here."
        ),
    ] = None,
) -> None:
    """Compare policies, predictors and ways to synchronise, in virtual time.

    On recorded workers (traces, or the record of a run) or invented ones (scenarios). Efficiency
    is the time of an oracle that knows each step's speeds over the scheme's time. All steps
    count, the first ones too, in which nothing is known yet. The shares of "fixed" are the mean
    speeds of the first fifth; "lbbsp-every" adopts every change, "lbbsp" what is worth it. Under
    another sync than bsp, a run ends when as many samples have entered the model.
    """
    out, err = Console(), Console(stderr=True)
    try:
        sizes = [None] if workers is None else _counts(workers)
        options = _Options(sizes, global_batch_size, lag, steps_per_epoch, communication)
        entrants = [
            *_traces([*(trace or []), *(more or [])], options, err),
            *(_run(path, options, err) for path in from_run or []),
            *(
                _scenario(load_scenario(name), size, steps, seed, options)
                for name in scenario or []
                for size in sizes
            ),
        ]
        if not entrants:
            raise ValueError(
                "simulate needs something to run on: name a trace file, --scenario "
                f"{'|'.join(PRESETS)}|FILE.toml, or --from-run RUN_DIR"
            )
        names = None if policies == _ALL else _split(policies)
        default = _QUICK if scenario else DEFAULT
        used = list(contenders(lag)) if predictors == _ALL else _split(predictors or default)
        runs = chosen_runs(names, used, lag, _split(sync))
        goal = _goal(target_accuracy, model, learning_rate)
        with countdown(err) as bar:
            task = bar.add_task("", total=len(runs) * sum(one.steps for one in entrants))

            def advance(file: str, title: str, steps: int) -> None:
                bar.update(task, advance=steps, description=escape(f"{file} {title}"))

            arenas = (one.arena() for one in entrants)
            results = [
                result if plots is not None else result._replace(run=None, curve=None)  # type: ignore[arg-type]
                for result in run_experiments(arenas, runs, goal=goal, progress=advance)
            ]
    except (ValueError, ModuleNotFoundError) as error:  # a TraceError is a ValueError
        err.print(f"lbbsp simulate: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    rows = [result.row for result in results]
    for _, own in groupby(rows, key=lambda row: (row.name, row.workers)):
        out.print(_table(list(own), target_accuracy))
    if json_file is not None:
        json_file.write_text(json.dumps(figures(rows), indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        from lbbsp_core.report.efficiencies import plot_efficiencies

        plot_efficiencies(rows, plot)
        out.print(f"drawn to {plot}", markup=False)
    if plots is not None:
        _draw(results, plots, out)


class _Options(NamedTuple):
    """What applies to all arenas; None: what each has of its own."""

    sizes: list[int] | list[None]
    global_batch_size: int | None
    lag: int
    steps_per_epoch: int | None
    communication: float | None


class _Entrant(NamedTuple):
    """An arena to be made, and its steps."""

    steps: int
    arena: Callable[[], Experiment]


def _split(names: str) -> list[str]:
    return [name for part in names.split(",") if (name := part.strip())]


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in _split(text)]
    except ValueError:
        counts = []
    if not counts or min(counts) < 2:
        raise ValueError(
            f"--workers must be whole numbers >= 2 with commas between, got {text!r}: a single "
            "worker has nobody to wait for"
        )
    return counts


def _traces(paths: list[Path], options: _Options, err: Console) -> Iterator[_Entrant]:
    traces = [read_trace(path) for path in paths]
    for trace, name in zip(traces, names_of(traces), strict=True):
        for size in options.sizes:
            cluster = replay_trace(trace, size)
            _note(trace, cluster, err)
            yield _replay(name, cluster, 0.0, options)


def _note(trace: Trace, cluster: ReplayedCluster, err: Console) -> None:
    for note in (*trace.notes, *cluster.notes):
        err.print(f"{trace.path}: {note}", style="yellow", markup=False, soft_wrap=True)


def _run(path: Path, options: _Options, err: Console) -> _Entrant:
    if options.sizes != [None]:
        raise ValueError("--workers does not go with --from-run: a record has the workers it has")
    run = cluster_from_run(path)
    for note in run.cluster.notes:
        err.print(f"{path}: {note}", style="yellow", markup=False, soft_wrap=True)
    err.print(
        f"{path}: {run.cluster.workers} workers, {run.step_seconds:.4g} s a step as recorded",
        style="dim",
        markup=False,
        soft_wrap=True,
    )
    return _replay(path.name or str(path), run.cluster, run.communication_seconds, options)


def _replay(name: str, cluster: ReplayedCluster, seconds: float, options: _Options) -> _Entrant:
    setting = SimConfig(
        options.global_batch_size or cluster.global_batch_size,
        options.lag,
        options.steps_per_epoch or STEPS_PER_EPOCH,
    )
    paid = FixedTime(seconds if options.communication is None else options.communication)
    return _Entrant(cluster.steps, lambda: Experiment(name, "trace", cluster, setting, paid))


def _scenario(
    scenario: Scenario, size: int | None, steps: int | None, seed: int | None, options: _Options
) -> _Entrant:
    if size is not None:
        scenario = scenario.sized(size)
    given = {
        "steps": steps,
        "seed": seed,
        "global_batch_size": options.global_batch_size,
        "steps_per_epoch": options.steps_per_epoch,
        "communication": None
        if options.communication is None
        else FixedTime(options.communication),
    }
    scenario = replace(scenario, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    return _Entrant(scenario.steps, lambda: arena_of(scenario, options.lag))


def _goal(accuracy: float | None, model: str, learning_rate: float) -> LearningTarget | None:
    if accuracy is None:
        return None
    build = MODELS[require_known("model", model, MODELS)]
    return LearningTarget(Task(digits(), build(), learning_rate), accuracy)


def _table(rows: list[Row], target: float | None) -> Table:
    several = {row.sync for row in rows} != {"bsp"}
    table = Table(
        title=escape(f"{rows[0].name}: {rows[0].workers} workers" + ", BSP" * (not several))
    )
    for column in ("sync",) * several + ("policy", "predictor"):
        table.add_column(column, no_wrap=True)
    numbers = ["total", "waiting", "efficiency"]
    for column in numbers if target is None else [*numbers, f"{target:.4g} accurate"]:
        table.add_column(column, justify="right")
    most = max(row.efficiency for row in rows)
    for row in rows:
        efficiency = f"{row.efficiency:.4f}"
        cells = [row.policy, row.predictor or "", f"{row.total_seconds:.2f} s"]
        cells += [f"{row.waiting_share:.1%}"]
        cells += [f"[bold]{efficiency}[/]" if row.efficiency == most else efficiency]
        if target is not None:
            at = row.time_to_accuracy_seconds
            cells += ["never" if at is None else f"{at:.2f} s"]
        table.add_row(*([row.sync] if several else []), *cells)
    return table


def _draw(results: list[Result], folder: Path, out: Console) -> None:
    from lbbsp_core.report.timelines import draw_all

    folder.mkdir(parents=True, exist_ok=True)
    for path in draw_all(results, folder):
        out.print(f"drawn to {path}", markup=False)
