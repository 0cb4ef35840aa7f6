"""`lbbsp simulate`: policies, predictors and synchronisers in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lbbsp_core.cli.completion import one_of, some_of
from lbbsp_core.cli.options import (
    ALL,
    JsonFile,
    consoles,
    one_line_errors,
    parse_predictors,
    require_picture,
    require_writable_file,
    require_writable_folder,
    search_current_directory,
    split_names,
    write_figures,
)
from lbbsp_core.cli.progress import countdown
from lbbsp_core.registry import POLICIES, PREDICTORS, SYNCHRONISERS
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
from lbbsp_core.sim.backtest import DEFAULT
from lbbsp_core.sim.experiment import (
    STEPS_PER_EPOCH,
    Experiment,
    LearningTarget,
    Row,
    experiment_of,
    figures,
    run_experiments,
)
from lbbsp_core.sim.runs import chosen_runs
from lbbsp_core.validate import require_known

_QUICK = "ema0.5"
"""Default for synthetic clusters, which may be large: it runs in arrays."""


@one_line_errors
def simulate(
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[TRACE]...", help="Further trace files.")
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="TRACE...", help="CSV trace files of two or more workers."),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE.toml",
            help=f"Synthetic cluster: {', '.join(PRESETS)}, or a TOML file.",
            autocompletion=one_of(PRESETS),
        ),
    ] = None,
    from_run: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN_DIR", help="Replay the recorded run of plain BSP in this folder."
        ),
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help=f"Policies: all, or some of {', '.join(POLICIES)}. Add options as in "
            "lbbsp:min_gain=0 or proportional:ratings=2/1/1. Name your own class as module:Name.",
            autocompletion=some_of([ALL, *POLICIES]),
        ),
    ] = ALL,
    predictors: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help=f"Predictors: all, or some of {', '.join(PREDICTORS)}. Name your own class as "
            f"module:Name. Default: {DEFAULT}; {_QUICK} for scenarios.",
            autocompletion=some_of([ALL, *PREDICTORS]),
        ),
    ] = None,
    sync: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Synchronisers, such as bsp, ssp:3, asp, dssp:3:15, elasticbsp:15. Name your own "
            "class as module:Name.",
            autocompletion=some_of(SYNCHRONISERS),
        ),
    ] = "bsp",
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N,M", help="Numbers of workers; a trace is cut to its first workers."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Length of a scenario, in global batches.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed of a scenario.")] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="X", help="Global batch size. Default: as recorded, or 64 per worker."
        ),
    ] = None,
    lag: Annotated[
        int, typer.Option(min=1, help="A plan decided after step k applies to step k + LAG.")
    ] = 1,
    steps_per_epoch: Annotated[
        int | None, typer.Option(min=1, help="Epoch length of dbs, which plans once per epoch.")
    ] = None,
    communication: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Communication time of each step, after the slowest worker.",
        ),
    ] = None,
    first_use_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Further time of a step with a batch size that is new to its worker, as on GPUs.",
        ),
    ] = None,
    target_accuracy: Annotated[
        float | None,
        typer.Option(
            metavar="A", help="Also train on digits, and show the time to this accuracy, in (0, 1]."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="Model to learn with: softmax or mlp.", autocompletion=one_of(MODELS)),
    ] = "softmax",
    learning_rate: Annotated[
        float, typer.Option(help="Learning rate of an update from X samples.")
    ] = 0.5,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the efficiencies to this HTML file.")
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Draw timelines, update times, accuracy and scaling to simulation.html in this "
            "folder.",
        ),
    ] = None,
) -> None:
    """Compare policies, predictors and synchronisers in virtual time.

    Workers are recorded (traces, or the record of a run) or synthetic (scenarios). Efficiency is
    the time of an oracle that knows each step's speeds, divided by the time of the run. All steps
    count, including the first ones, in which no speed is known yet. The shares of "fixed" are the
    mean speeds in the first fifth of the steps; "lbbsp-every" adopts every change, "lbbsp" only
    those that gain enough. With a synchroniser other than bsp, a run ends when the same number of
    samples has entered the model. Your own classes (module:Name) are also searched for in the
    current directory.
    """
    out, err = consoles(json_file)
    require_writable_file("--json", json_file)
    require_picture("--plot", plot)
    require_writable_folder("--plots", plots)
    search_current_directory()
    sizes = [None] if workers is None else _counts(workers)
    options = _Options(
        sizes, global_batch_size, lag, steps_per_epoch, communication, first_use_seconds
    )
    entrants = [
        *_traces([*(trace or []), *(more or [])], options, err),
        *(_run(path, options, err) for path in from_run or []),
        *(
            _scenario(kind, size, steps, seed, options)
            for name in scenario or []
            for size in sizes
            for kind in load_scenario(name).kinds()
        ),
    ]
    if not entrants:
        raise ValueError(
            "simulate needs a cluster: name a trace file, --scenario "
            f"{'|'.join(PRESETS)}|FILE.toml, or --from-run RUN_DIR"
        )
    names = None if policies == ALL else split_names(policies)
    default = _QUICK if scenario else DEFAULT
    runs = chosen_runs(names, parse_predictors(predictors or default), lag, split_names(sync))
    goal = _goal(target_accuracy, model, learning_rate)
    with countdown(err) as bar:
        task = bar.add_task("", total=len(runs) * sum(one.steps for one in entrants))

        def advance(file: str, title: str, steps: int) -> None:
            bar.update(task, advance=steps, description=escape(f"{file} {title}"))

        experiments = (one.experiment() for one in entrants)
        results = [
            result if plots is not None else result._replace(run=None, curve=None)  # type: ignore[arg-type]
            for result in run_experiments(experiments, runs, goal=goal, progress=advance)
        ]
    rows = [result.row for result in results]
    for _, own in groupby(rows, key=lambda row: (row.name, row.workers)):
        out.print(_table(list(own), target_accuracy))
    if json_file is not None:
        write_figures(json_file, figures(rows))
    if plot is not None:
        from lbbsp_core.report.simulations import draw_efficiencies

        draw_efficiencies(rows, plot)
        out.print(f"plot written to {plot}", markup=False)
    if plots is not None:
        from lbbsp_core.report.simulations import draw_simulation

        draw_simulation(results, plots / "simulation.html")
        out.print(f"plots written to {plots / 'simulation.html'}", markup=False)


class _Options(NamedTuple):
    """Options that apply to all experiments; None: each keeps its own value."""

    sizes: list[int] | list[None]
    global_batch_size: int | None
    lag: int
    steps_per_epoch: int | None
    communication: float | None
    first_use_seconds: float | None


class _Entrant(NamedTuple):
    """An experiment to create, and its number of steps."""

    steps: int
    experiment: Callable[[], Experiment]


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in split_names(text)]
    except ValueError:
        counts = []
    if not counts or min(counts) < 2:
        raise ValueError(
            f"--workers must be whole numbers >= 2 separated by commas, got {text!r}: a "
            "single worker never waits"
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
        raise ValueError(
            "--workers cannot be combined with --from-run: a record has a fixed number of workers"
        )
    run = cluster_from_run(path)
    for note in run.cluster.notes:
        err.print(f"{path}: {note}", style="yellow", markup=False, soft_wrap=True)
    err.print(
        f"{path}: {run.cluster.workers} workers, {run.step_seconds:.4g} s per step as recorded",
        style="dim",
        markup=False,
        soft_wrap=True,
    )
    return _replay(path.name or str(path), run.cluster, run.communication_seconds, options)


def _replay(name: str, cluster: ReplayedCluster, seconds: float, options: _Options) -> _Entrant:
    config = SimConfig(
        options.global_batch_size or cluster.global_batch_size,
        options.lag,
        options.steps_per_epoch or STEPS_PER_EPOCH,
        first_use_seconds=options.first_use_seconds or 0.0,
    )
    paid = FixedTime(seconds if options.communication is None else options.communication)
    return _Entrant(cluster.steps, lambda: Experiment(name, "trace", cluster, config, paid))


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
        "first_use_seconds": options.first_use_seconds,
        "communication": None
        if options.communication is None
        else FixedTime(options.communication),
    }
    scenario = replace(scenario, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    return _Entrant(scenario.steps, lambda: experiment_of(scenario, options.lag))


def _goal(accuracy: float | None, model: str, learning_rate: float) -> LearningTarget | None:
    if accuracy is None:
        return None
    build = MODELS[require_known("model", model, MODELS)]
    return LearningTarget(Task(digits(), build(), learning_rate), accuracy)


def _table(rows: list[Row], target: float | None) -> Table:
    show_sync = {row.sync for row in rows} != {"bsp"}
    table = Table(
        title=escape(f"{rows[0].name}: {rows[0].workers} workers" + ", BSP" * (not show_sync))
    )
    for column in ("sync",) * show_sync + ("policy", "predictor"):
        table.add_column(column, no_wrap=True)
    numbers = ["total", "waiting", "efficiency"]
    for column in numbers if target is None else [*numbers, f"{target:.4g} accurate"]:
        table.add_column(column, justify="right")
    best = max(row.efficiency for row in rows)
    for row in rows:
        efficiency = f"{row.efficiency:.4f}"
        cells = [row.policy, row.predictor or "", f"{row.total_seconds:.2f} s"]
        cells += [f"{row.waiting_share:.1%}"]
        cells += [f"[bold]{efficiency}[/]" if row.efficiency == best else efficiency]
        if target is not None:
            at = row.time_to_accuracy_seconds
            cells += ["never" if at is None else f"{at:.2f} s"]
        table.add_row(*([row.sync] if show_sync else []), *cells)
    return table
