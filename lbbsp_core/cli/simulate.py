"""`lbbsp simulate`: policies, predictors and synchronisers in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lbbsp_core.cli import options
from lbbsp_core.cli.options import split_names
from lbbsp_core.cli.predictors import ALL, Predictors, parse_predictors
from lbbsp_core.cli.progress import countdown
from lbbsp_core.registry import POLICIES
from lbbsp_core.sim import (
    PRESETS,
    FixedTime,
    ReplayedCluster,
    SimConfig,
    cluster_from_run,
    load_scenario,
    read_trace,
    replay_trace,
)
from lbbsp_core.sim.backtest import DEFAULT
from lbbsp_core.sim.experiment import (
    Experiment,
    Row,
    chosen_runs,
    experiment_of,
    figures,
    run_experiments,
)
from lbbsp_core.sim.traces import names_of
from lbbsp_core.validate import require_integer

_QUICK = "ema0.5"
"""Default for synthetic clusters, which may be large: it runs in arrays."""


@options.one_line_errors
def simulate(
    more: list[Path] | None = typer.Argument(
        None, metavar="[TRACE]...", help="Further trace files."
    ),
    trace: list[Path] | None = typer.Option(
        None, metavar="TRACE...", help="CSV trace files of two or more workers."
    ),
    scenario: list[str] | None = typer.Option(
        None,
        metavar="NAME|FILE.toml",
        help=f"Synthetic cluster: {', '.join(PRESETS)}, or a TOML file.",
    ),
    from_run: list[Path] | None = typer.Option(
        None, metavar="RUN_DIR", help="Replay the recorded run of plain BSP in this folder."
    ),
    policies: str = typer.Option(
        ALL,
        metavar="A,B",
        help=f"Policies: all, or some of {', '.join(POLICIES)}. Add options as in "
        "lbbsp:min_gain=0 or proportional:ratings=2/1/1. Name your own class as module:Name. In "
        "lbbsp+reserve workers share work inside a step.",
    ),
    predictors: Predictors = None,
    sync: str = typer.Option(
        "bsp",
        metavar="A,B",
        help="Synchronisers, such as bsp, ssp:3, asp, dssp:3:15, elasticbsp:15. Name your own "
        "class as module:Name.",
    ),
    workers: str | None = typer.Option(
        None, metavar="N,M", help="Numbers of workers; a trace is cut to its first workers."
    ),
    steps: int | None = typer.Option(
        None, metavar="STEPS", help="Length of a scenario, in global batches."
    ),
    seed: int | None = typer.Option(None, metavar="SEED", help="Random seed of a scenario."),
    global_batch_size: int | None = typer.Option(
        None,
        metavar="SAMPLES",
        help="Global batch size. Default: as recorded, or 64 per worker.",
    ),
    lag: int = typer.Option(
        1, metavar="STEPS", help="A plan decided after step k applies to step k + lag."
    ),
    steps_per_epoch: int | None = typer.Option(
        None, metavar="STEPS", help="Epoch length of dbs, which plans once per epoch."
    ),
    communication: float | None = typer.Option(
        None, metavar="SECONDS", help="Communication after the slowest worker in each step."
    ),
    first_use_seconds: float | None = typer.Option(
        None,
        metavar="SECONDS",
        help="Further time of a step with a batch size that is new to its worker, as on GPUs.",
    ),
    part_overhead: float | None = typer.Option(
        None,
        metavar="FRACTION",
        help="Overhead of a part that a worker claims of a reserve, as a fraction of an even "
        "batch. Default: 0.01.",
    ),
    claim_seconds: float | None = typer.Option(
        None, metavar="SECONDS", help="Time of such a claim. Default: 0.001."
    ),
    json_file: options.JsonFile = None,
    plot: Path | None = typer.Option(
        None, metavar="FILE", help="Draw the efficiencies to this HTML file."
    ),
    plots: Path | None = typer.Option(
        None,
        metavar="DIR",
        parser=options.folder,
        help="Draw total times, updates and scaling to DIR/simulation.html.",
    ),
) -> None:
    """Compare policies, predictors and synchronisers in virtual time.

    Workers are recorded (traces, or the record of a run) or synthetic (scenarios). Efficiency is
    the time of an oracle that knows each step's speeds, divided by the time of the run. All steps
    count, including the first ones, in which no speed is known yet. The shares of "fixed" are the
    mean speeds in the first fifth of the steps; "lbbsp-every" adopts every change, "lbbsp" only
    those that gain enough. The predictor is mixture by default, and ema0.5 for scenarios, which it
    runs faster. With a synchroniser other than bsp, a run ends when the same number of
    samples has entered the model. Your own classes (module:Name) are also searched for in the
    current directory.
    """
    inputs = [*(trace or []), *(more or []), *(from_run or []), *map(Path, scenario or [])]
    out, err = options.consoles(json_file, inputs)
    options.require_picture("--plot", plot, inputs)
    options.require_writable_folder("--plots", plots)
    options.search_current_directory()
    sizes = [None] if workers is None else _counts(workers)
    if global_batch_size is not None:  # 0 in the file of a scenario: the default
        require_integer("global_batch_size", global_batch_size, 1)
    given = {
        "global_batch_size": global_batch_size,
        "steps_per_epoch": steps_per_epoch,
        "first_use_seconds": first_use_seconds,
        "communication": None if communication is None else FixedTime(communication),
    }
    given = {name: value for name, value in given.items() if value is not None}
    costs: dict[str, Any] = {"part_overhead": part_overhead, "claim_seconds": claim_seconds}
    costs = {name: value for name, value in costs.items() if value is not None}
    clusters = _Clusters(sizes, lag, given, costs, err)
    entrants = [
        *clusters.of_traces([*(trace or []), *(more or [])]),
        *map(clusters.of_run, from_run or []),
        *(
            one
            for name in scenario or []
            for one in clusters.of_scenario(name, steps=steps, seed=seed)
        ),
    ]
    if not entrants:
        raise ValueError(
            "simulate needs a cluster: name a trace file, --scenario "
            f"{'|'.join(PRESETS)}|FILE.toml, or --from-run RUN_DIR"
        )
    names = None if policies == ALL else split_names(policies)
    default = _QUICK if scenario else DEFAULT
    runs = chosen_runs(
        names,
        parse_predictors(predictors or default),
        lag,
        split_names(sync),
        preemption=any(one.preempted for one in entrants),
    )
    with countdown(err, len(runs) * sum(one.steps for one in entrants)) as advance:
        experiments = (one.experiment() for one in entrants)
        results = [
            result if plots is not None else result._replace(run=None)  # type: ignore[arg-type]
            for result in run_experiments(experiments, runs, progress=advance)
        ]
    rows = [result.row for result in results]
    for _, group in groupby(rows, key=lambda row: (row.name, row.workers)):
        out.print(_table(own := list(group)))
        for row in own:
            for text in row.notices[:2]:
                options.note(out, f"{row.title}: {text}")
            if more_turns := len(row.notices[2:]):
                options.note(out, f"{row.title}: {more_turns} further turns")
    options.write_figures(json_file, figures(rows))
    if plot is not None:
        from lbbsp_core.report.simulations import draw_efficiencies

        draw_efficiencies(rows, plot)
        out.print(f"plot written to {plot}", markup=False)
    if plots is not None:
        from lbbsp_core.report.simulations import draw_simulation

        draw_simulation(results, plots / "simulation.html")
        out.print(f"plots written to {plots / 'simulation.html'}", markup=False)


class _Entrant(NamedTuple):
    """An experiment to create, its number of steps, and whether workers leave and return."""

    steps: int
    experiment: Callable[[], Experiment]
    preempted: bool = False


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 2:
        raise ValueError(
            f"--workers must be whole numbers >= 2 separated by commas, got {text!r}: a "
            "single worker never waits"
        )
    return counts


@dataclass(frozen=True)
class _Clusters:
    """Reads clusters, with the options that all of them share; those not `given` are their own."""

    sizes: list[int] | list[None]
    lag: int
    given: dict[str, Any]
    costs: dict[str, Any]  # of work sharing
    err: Console

    def of_traces(self, paths: list[Path]) -> Iterator[_Entrant]:
        traces = [read_trace(path) for path in paths]
        for trace, name in zip(traces, names_of(traces), strict=True):
            for size in self.sizes:
                cluster = replay_trace(trace, size)
                for text in (*trace.notes, *cluster.notes):
                    options.note(self.err, f"{trace.path}: {text}")
                yield self._replay(name, cluster, 0.0)

    def of_run(self, path: Path) -> _Entrant:
        if self.sizes != [None]:
            raise ValueError(
                "--workers cannot be combined with --from-run: a record has a fixed number of "
                "workers"
            )
        run = cluster_from_run(path)
        for text in run.cluster.notes:
            options.note(self.err, f"{path}: {text}")
        workers, seconds = run.cluster.workers, run.step_seconds
        options.show(
            self.err, f"{path}: {workers} workers, {seconds:.4g} s per step as recorded", "dim"
        )
        return self._replay(path.name or str(path), run.cluster, run.communication_seconds)

    def of_scenario(self, name: str, **length: int | None) -> Iterator[_Entrant]:
        own: dict[str, Any] = {key: n for key, n in length.items() if n is not None}
        for size in self.sizes:
            for kind in load_scenario(name).kinds():
                sized = kind if size is None else kind.sized(size)
                scenario = replace(sized, **own, **self.given)
                experiment = partial(experiment_of, scenario, self.lag, **self.costs)
                yield _Entrant(scenario.steps, experiment, scenario.preemption is not None)

    def _replay(self, name: str, cluster: ReplayedCluster, seconds: float) -> _Entrant:
        chosen = {"global_batch_size": cluster.global_batch_size, **self.given}
        paid = chosen.pop("communication", FixedTime(seconds))
        config = SimConfig(lag=self.lag, **chosen, **self.costs)
        return _Entrant(cluster.steps, partial(Experiment, name, "trace", cluster, config, paid))


def _table(rows: list[Row]) -> Table:
    syncs = {row.sync for row in rows}
    names = ["sync", "policy", "predictor"] if syncs != {"bsp"} else ["policy", "predictor"]
    bsp = "" if "sync" in names else ", BSP"
    table = options.FiguresTable(
        names,
        ("total", "waiting", "efficiency"),
        title=escape(f"{rows[0].name}: {rows[0].workers} workers{bsp}"),
    )
    best = max(row.efficiency for row in rows)
    for row in rows:
        efficiency = f"[bold]{best:.4f}[/]" if row.efficiency == best else f"{row.efficiency:.4f}"
        cells = [f"{row.total_seconds:.2f} s", f"{row.waiting_share:.1%}", efficiency]
        table.add_row(*(getattr(row, name) or "" for name in names), *cells)
    return table
