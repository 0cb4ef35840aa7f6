"""Command ``lbbsp evaluate``: backtest of predictors on recorded traces and runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lbbsp_core.cli import options
from lbbsp_core.cli.predictors import ALL, Predictors, parse_predictors
from lbbsp_core.cli.progress import countdown
from lbbsp_core.installation import extra
from lbbsp_core.registry import PREDICTORS
from lbbsp_core.sim import read_trace, trace_from_run, write_trace
from lbbsp_core.sim.backtest import DEFAULT, Evaluation
from lbbsp_core.sim.backtest import evaluate as run_evaluation
from lbbsp_core.validate import require_integer


@options.one_line_errors
def evaluate(
    traces: list[Path] | None = typer.Argument(
        None, metavar="[TRACE]...", help="Trace files in CSV format."
    ),
    from_run: list[Path] | None = typer.Option(
        None,
        metavar="RUN_DIR",
        help="Also evaluate on the run recorded in this folder; repeatable.",
    ),
    predictors: Predictors = ALL,
    horizon: int = typer.Option(
        1, metavar="STEPS", help="Steps ahead to forecast; 1 is the next step."
    ),
    json_file: options.JsonFile = None,
    export: Path | None = typer.Option(
        None, metavar="FILE", help="Write the run of --from-run to this trace file."
    ),
) -> None:
    """Score speed predictors on recorded traces or runs.

    In each iteration a predictor forecasts, is scored, then learns. The RMSE is that of speed /
    mean speed; the first fifth of each series is not scored. Efficiency is the time of an oracle
    that knows each step's speeds, divided by the time of all workers of a trace together, whose
    batch sizes follow from the forecasts.
    """
    inputs = [*(traces or []), *(from_run or [])]
    out, err = options.consoles(json_file, inputs)
    options.require_writable_file("--export", export, inputs)
    options.search_current_directory()
    names = parse_predictors(str(predictors))
    require_integer("horizon", horizon, 1)  # before predictors name it as theirs
    chosen = {name: PREDICTORS.build(name, horizon=horizon) for name in names}
    runs = [trace_from_run(path) for path in from_run or []]
    loaded = [*(read_trace(path) for path in traces or []), *runs]
    if not loaded:
        raise ValueError("evaluate needs a trace: name a trace file, or --from-run RUN_DIR")
    for trace in loaded:
        for text in trace.notes:
            options.note(err, f"{trace.path}: {text}")
    if export is not None:
        if len(runs) != 1:
            raise ValueError(
                f"--export writes one run, got {len(runs)}: give one --from-run RUN_DIR"
            )
        write_trace(export, runs[0])
        out.print(f"trace written to {export}", markup=False)
    if predictors == ALL and "arima" not in chosen:
        text = "arima is left out because statsmodels is not installed: pip install "
        text += extra("arima")
        options.note(err, text)
    total = len(chosen) * sum(len(series) for trace in loaded for series in trace.series)
    with countdown(err, total) as advance:
        result = run_evaluation(loaded, predictors=chosen, horizon=horizon, progress=advance)
    for text in result.notes.values():
        options.note(err, text)
    _print(out, result)
    options.write_figures(json_file, result.figures())


def _print(out: Console, result: Evaluation) -> None:
    names, traces = result.predictors, result.scores.values()
    errors = [[score.rmse for score in trace.values()] for trace in traces]
    errors.append([result.geometric_mean_rmse(name) for name in names])
    title = f"RMSE of speed / mean speed, horizon {result.horizon}"
    out.print(_by_trace(result, title, errors, "geometric mean", min))
    if len(result.notes) < len(result.scores):
        efficiencies = [[score.efficiency for score in trace.values()] for trace in traces]
        efficiencies.append([result.mean_efficiency(name) for name in names])
        title = f"efficiency of LoadBalanced with these forecasts, lag {result.horizon}"
        out.print(_by_trace(result, title, efficiencies, "mean", max))
    title = "MAPE, and microseconds of thread CPU time (means over traces; largest percentile)"
    figures = "MAPE", "update", "predict", "p99.9"
    costs = options.FiguresTable(("predictor",), figures, title=title)
    for name in names:
        scores = [trace[name] for trace in traces]
        update = fmean(score.update_us for score in scores)
        predict = fmean(score.predict_us for score in scores)
        mape, tail = fmean(score.mape for score in scores), max(score.p999_us for score in scores)
        costs.add_row(_label(name), f"{mape:.1%}", f"{update:.1f}", f"{predict:.1f}", f"{tail:.0f}")
    out.print(costs)


def _by_trace(
    result: Evaluation,
    title: str,
    columns: Sequence[Sequence[float | None]],
    mean: str,
    best: Callable[..., float | None],
) -> Table:
    """Returns a table of a figure, with a column for each trace and for their mean."""
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("predictor", overflow="fold")
    for file in (*result.scores, mean):
        name = file.removesuffix(".csv").replace("_", " ")  # breaks at spaces in a narrow terminal
        table.add_column(escape(name), justify="right", overflow="fold", min_width=6)
    number_columns = [[value for value in column if value is not None] for column in columns]
    marked = [best(column, default=None) for column in number_columns]
    for name, *row in zip(result.predictors, *columns, strict=True):
        table.add_row(_label(name), *map(_cell, row, marked))
    return table


def _cell(value: float | None, best: float | None) -> str:
    if value is None:
        return "-"
    return f"[bold]{value:.4f}[/]" if value == best else f"{value:.4f}"


def _label(name: str) -> str:
    return f"{name} (default)" if name == DEFAULT else name
