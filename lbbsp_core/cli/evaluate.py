"""Command ``lbbsp evaluate``: backtest of predictors on recorded traces and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lbbsp_core.cli.completion import some_of
from lbbsp_core.cli.options import (
    ALL,
    JsonFile,
    consoles,
    one_line_errors,
    parse_predictors,
    require_picture,
    require_writable_file,
    search_current_directory,
    write_figures,
)
from lbbsp_core.cli.progress import countdown
from lbbsp_core.predict import Predictor
from lbbsp_core.registry import PREDICTORS
from lbbsp_core.sim import Trace, read_trace, trace_from_run, write_trace
from lbbsp_core.sim.backtest import DEFAULT, Evaluation, contenders
from lbbsp_core.sim.backtest import evaluate as run_evaluation


@one_line_errors
def evaluate(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[TRACE]...", help="Trace files in CSV format."),
    ] = None,
    from_run: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Also evaluate on the recorded run in this folder. May be repeated.",
        ),
    ] = None,
    predictors: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help=f"Predictors: all, or some of {', '.join(PREDICTORS)}. Add options as in "
            "narx:hidden=4. Name your own class as module:Name.",
            autocompletion=some_of([ALL, *PREDICTORS]),
        ),
    ] = ALL,
    horizon: Annotated[
        int, typer.Option(min=1, help="Iterations ahead to forecast; 1 is the next iteration.")
    ] = 1,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw forecasts and measured speeds to this HTML file."),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the run of --from-run to this trace file."),
    ] = None,
) -> None:
    """Score speed predictors on recorded traces or runs.

    In each iteration a predictor forecasts, is scored, then learns. The RMSE is that of speed /
    mean speed; the first fifth of each series is not scored. Efficiency is the time of an oracle
    that knows each step's speeds, divided by the time of all workers of a trace together, whose
    batch sizes follow from the forecasts.
    """
    out, err = consoles(json_file)
    require_writable_file("--json", json_file)
    require_picture("--plot", plot)
    require_writable_file("--export", export)
    search_current_directory()
    chosen = _predictors(predictors, horizon)
    runs = [trace_from_run(path) for path in from_run or []]
    loaded = [*(read_trace(path) for path in traces or []), *runs]
    if not loaded:
        raise ValueError("evaluate needs a trace: name a trace file, or --from-run RUN_DIR")
    for trace in loaded:
        for note in trace.notes:
            _note(err, f"{trace.path}: {note}")
    if export is not None:
        _export(out, runs, export)
    if predictors == ALL and "arima" not in chosen:
        _note(
            err,
            "arima is left out because statsmodels is not installed: pip install 'lbbsp[arima]'",
        )
    result = _run(err, loaded, chosen, horizon)
    for note in result.notes.values():
        _note(err, note)
    _print(out, result)
    if json_file is not None:
        write_figures(json_file, result.figures())
    if plot is not None:
        from lbbsp_core.report.pictures import draw_forecasts

        draw_forecasts(result, plot)
        out.print(f"plot written to {plot}", markup=False)


def _predictors(text: str, horizon: int) -> dict[str, Predictor]:
    """Creates the predictors of the option ``--predictors``, by the names given there."""
    if text != ALL:
        return {name: PREDICTORS.build(name, horizon=horizon) for name in parse_predictors(text)}
    return contenders(horizon)


def _note(err: Console, text: str) -> None:
    err.print(text, style="yellow", markup=False)


def _export(out: Console, runs: list[Trace], path: Path) -> None:
    if len(runs) != 1:
        raise ValueError(f"--export writes one run, got {len(runs)}: give one --from-run RUN_DIR")
    write_trace(path, runs[0])
    out.print(f"trace written to {path}", markup=False)


def _run(
    err: Console, traces: list[Trace], predictors: dict[str, Predictor], horizon: int
) -> Evaluation:
    total = len(predictors) * sum(len(series) for trace in traces for series in trace.series)
    with countdown(err) as bar:
        task = bar.add_task("", total=total)

        def advance(file: str, name: str, iterations: int) -> None:
            bar.update(task, advance=iterations, description=escape(f"{file} {name}"))

        return run_evaluation(traces, predictors=predictors, horizon=horizon, progress=advance)


def _print(out: Console, result: Evaluation) -> None:
    errors = _table(result, f"RMSE of speed / mean speed, horizon {result.horizon}")
    errors.add_column("geometric mean", justify="right", overflow="fold")
    lowest = {file: min(s.rmse for s in scores.values()) for file, scores in result.scores.items()}
    for name in result.predictors:
        cells = [
            f"[bold]{scores[name].rmse:.4f}[/]"
            if scores[name].rmse == lowest[file]
            else f"{scores[name].rmse:.4f}"
            for file, scores in result.scores.items()
        ]
        errors.add_row(_label(name), *cells, f"{result.geometric_mean_rmse(name):.4f}")
    out.print(errors)
    if len(result.notes) < len(result.scores):
        out.print(_efficiencies(result))
    costs = Table(
        title="MAPE, and microseconds of thread CPU time (means over traces; largest percentile)"
    )
    for column in ("predictor", "MAPE", "update", "predict", "99.9th percentile"):
        costs.add_column(column, justify="left" if column == "predictor" else "right")
    for name in result.predictors:
        of_traces = [scores[name] for scores in result.scores.values()]
        mape, update, predict = (
            sum(values) / len(of_traces)
            for values in zip(
                *((s.mape, s.update_us, s.predict_us) for s in of_traces), strict=True
            )
        )
        tail = max(score.p999_us for score in of_traces)
        costs.add_row(_label(name), f"{mape:.1%}", f"{update:.1f}", f"{predict:.1f}", f"{tail:.0f}")
    out.print(costs)


def _table(result: Evaluation, title: str) -> Table:
    """Returns a table with a column for the predictors, and one for each trace."""
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("predictor", no_wrap=True)
    for file in result.scores:
        name = file.removesuffix(".csv").replace("_", " ")  # breaks at spaces in a narrow terminal
        table.add_column(escape(name), justify="right", overflow="fold")
    return table


def _efficiencies(result: Evaluation) -> Table:
    table = _table(result, f"efficiency of LoadBalanced with these forecasts, lag {result.horizon}")
    table.add_column("mean", justify="right", overflow="fold")
    of_traces = [
        [score.efficiency for score in scores.values()] for scores in result.scores.values()
    ]
    columns = [*of_traces, [result.mean_efficiency(name) for name in result.predictors]]
    best = [max((x for x in column if x is not None), default=None) for column in columns]
    for name, row in zip(result.predictors, zip(*columns, strict=True), strict=True):
        table.add_row(_label(name), *map(_cell, row, best))
    return table


def _cell(efficiency: float | None, best: float | None) -> str:
    if efficiency is None:
        return "-"
    return f"[bold]{efficiency:.4f}[/]" if efficiency == best else f"{efficiency:.4f}"


def _label(name: str) -> str:
    return f"{name} (default)" if name == DEFAULT else name
