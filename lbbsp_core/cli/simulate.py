"""`lbbsp simulate`: policies, predictors and synchronisers in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lbbsp_core.cli import options
from lbbsp_core.cli.options import optional, split_names
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
    Result,
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

_OF_ALL: Final = "global_batch_size", "steps_per_epoch", "first_use_seconds", "communication"
_COSTS: Final = "part_overhead", "claim_seconds"  # of work sharing


class _Entrant(NamedTuple):
    """An experiment to create, its number of steps, and whether workers leave and return."""

    steps: int
    experiment: Callable[[], Experiment]
    preempted: bool = False


class _Inputs(NamedTuple):
    """What clusters are read from."""

    more: list[Path] | None = typer.Argument(
        None, metavar="[TRACE]...", help="Further trace files."
    )
    trace: list[Path] | None = optional(
        metavar="TRACE...", help="CSV trace files of two or more workers."
    )
    scenario: list[str] | None = optional(
        metavar="NAME|FILE.toml", help=f"Synthetic cluster: {', '.join(PRESETS)}, or a TOML file."
    )
    from_run: list[Path] | None = optional(
        metavar="RUN_DIR", help="Replay the recorded run of plain BSP in this folder."
    )

    @property
    def traces(self) -> list[Path]:
        return [*(self.trace or []), *(self.more or [])]

    @property
    def files(self) -> list[Path]:
        return [*self.traces, *(self.from_run or []), *map(Path, self.scenario or [])]


class _Clusters(NamedTuple):
    """Options of all clusters, and how these are read; what is not given is a cluster's own."""

    workers: str | None = optional(
        metavar="N,M", help="Numbers of workers; a trace is cut to its first workers."
    )
    steps: int | None = optional(metavar="STEPS", help="Length of a scenario, in global batches.")
    seed: int | None = optional(metavar="SEED", help="Random seed of a scenario.")
    global_batch_size: int | None = optional(
        metavar="SAMPLES", help="Global batch size. Default: as recorded, or 64 per worker."
    )
    lag: int = typer.Option(
        1, metavar="STEPS", help="A plan decided after step k applies to step k + lag."
    )
    steps_per_epoch: int | None = optional(
        metavar="STEPS", help="Epoch length of dbs, which plans once per epoch."
    )
    communication: float | None = optional(
        metavar="SECONDS", help="Communication after the slowest worker in each step."
    )
    first_use_seconds: float | None = optional(
        metavar="SECONDS",
        help="Further time of a step with a batch size that is new to its worker, as on GPUs.",
    )
    part_overhead: float | None = optional(
        metavar="FRACTION",
        help="Overhead of a part that a worker claims of a reserve, as a fraction of an even "
        "batch. Default: 0.01.",
    )
    claim_seconds: float | None = optional(
        metavar="SECONDS", help="Time of such a claim. Default: 0.001."
    )

    def check(self) -> None:
        """Raises ValueError if an option is wrong, before files are read."""
        self._sizes()
        if self.global_batch_size is not None:  # 0 in the file of a scenario: the default
            require_integer("global_batch_size", self.global_batch_size, 1)

    def entrants(self, inputs: _Inputs, err: Console) -> Iterator[_Entrant]:
        """Yields all clusters, traces first."""
        yield from self._of_traces(inputs.traces, err)
        for path in inputs.from_run or []:
            yield self._of_run(path, err)
        for name in inputs.scenario or []:
            yield from self._of_scenario(name)

    def _of_traces(self, paths: list[Path], err: Console) -> Iterator[_Entrant]:
        traces = [read_trace(path) for path in paths]
        for trace, name in zip(traces, names_of(traces), strict=True):
            for size in self._sizes():
                cluster = replay_trace(trace, size)
                for text in (*trace.notes, *cluster.notes):
                    options.note(err, f"{trace.path}: {text}")
                yield self._replay(name, cluster, 0.0)

    def _of_run(self, path: Path, err: Console) -> _Entrant:
        if self.workers is not None:
            raise ValueError(
                "--workers cannot be combined with --from-run: a record has a fixed number of "
                "workers"
            )
        run = cluster_from_run(path)
        for text in run.cluster.notes:
            options.note(err, f"{path}: {text}")
        workers, seconds = run.cluster.workers, run.step_seconds
        options.show(err, f"{path}: {workers} workers, {seconds:.4g} s per step as recorded", "dim")
        return self._replay(path.name or str(path), run.cluster, run.communication_seconds)

    def _of_scenario(self, name: str) -> Iterator[_Entrant]:
        settings = self._given("steps", "seed", *_OF_ALL)
        for size in self._sizes():
            for kind in load_scenario(name).kinds():
                scenario = replace(kind if size is None else kind.sized(size), **settings)
                experiment = partial(experiment_of, scenario, self.lag, **self._given(*_COSTS))
                yield _Entrant(scenario.steps, experiment, scenario.preemption is not None)

    def _replay(self, name: str, cluster: ReplayedCluster, seconds: float) -> _Entrant:
        chosen = {"global_batch_size": cluster.global_batch_size, **self._given(*_OF_ALL)}
        paid = chosen.pop("communication", FixedTime(seconds))
        config = SimConfig(lag=self.lag, **chosen, **self._given(*_COSTS))
        return _Entrant(cluster.steps, partial(Experiment, name, "trace", cluster, config, paid))

    def _given(self, *names: str) -> dict[str, Any]:
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        if "communication" in values:
            values["communication"] = FixedTime(values["communication"])
        return values

    def _sizes(self) -> list[int] | list[None]:
        if self.workers is None:
            return [None]
        try:
            counts = [int(part) for part in self.workers.split(",")]
        except ValueError:
            counts = []
        if not counts or min(counts) < 2:
            raise ValueError(
                f"--workers must be whole numbers >= 2 separated by commas, got {self.workers!r}: "
                "a single worker never waits"
            )
        return counts


class _Results(NamedTuple):
    """Where the results go."""

    json_file: options.JsonFile = None
    plot: Path | None = optional(metavar="FILE", help="Draw the efficiencies to this HTML file.")
    plots: Path | None = optional(
        metavar="DIR",
        parser=options.folder,
        help="Draw total times, updates and scaling to DIR/simulation.html.",
    )

    def consoles(self, inputs: list[Path]) -> tuple[Console, Console]:
        """Returns the consoles of results and messages; checks that all files can be written."""
        consoles = options.consoles(self.json_file, inputs)
        options.require_picture("--plot", self.plot, inputs)
        options.require_writable_folder("--plots", self.plots)
        return consoles

    def show(self, out: Console, results: list[Result]) -> None:
        """Prints the results, and writes what is asked for."""
        rows = [result.row for result in results]
        for _, group in groupby(rows, key=lambda row: (row.name, row.workers)):
            out.print(_table(group_rows := list(group)))
            for row in group_rows:
                for text in row.notices[:2]:
                    options.note(out, f"{row.title}: {text}")
                if more_turns := len(row.notices[2:]):
                    options.note(out, f"{row.title}: {more_turns} further turns")
        options.write_figures(self.json_file, figures(rows))
        if self.plot is not None:
            from lbbsp_core.report.simulations import draw_efficiencies

            draw_efficiencies(rows, self.plot)
            out.print(f"plot written to {self.plot}", markup=False)
        if self.plots is not None:
            from lbbsp_core.report.simulations import draw_simulation

            draw_simulation(results, self.plots / "simulation.html")
            out.print(f"plots written to {self.plots / 'simulation.html'}", markup=False)


@options.one_line_errors
@options.grouped
def simulate(
    inputs: _Inputs,
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
    *,
    clusters: _Clusters,
    results: _Results,
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
    out, err = results.consoles(inputs.files)
    options.search_current_directory()
    clusters.check()
    entrants = list(clusters.entrants(inputs, err))
    if not entrants:
        raise ValueError(
            "simulate needs a cluster: name a trace file, --scenario "
            f"{'|'.join(PRESETS)}|FILE.toml, or --from-run RUN_DIR"
        )
    runs = chosen_runs(
        None if policies == ALL else split_names(policies),
        parse_predictors(predictors or (_QUICK if inputs.scenario else DEFAULT)),
        clusters.lag,
        split_names(sync),
        preemption=any(entrant.preempted for entrant in entrants),
    )
    with countdown(err, len(runs) * sum(entrant.steps for entrant in entrants)) as advance:
        experiments = (entrant.experiment() for entrant in entrants)
        compared = [
            result if results.plots is not None else result._replace(run=None)  # type: ignore[arg-type]
            for result in run_experiments(experiments, runs, progress=advance)
        ]
    results.show(out, compared)


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
