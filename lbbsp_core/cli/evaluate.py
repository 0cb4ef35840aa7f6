"""Command ``lbbsp evaluate``: backtest of predictors on recorded traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lbbsp_core.cli.options import (
    one_line_errors,
    require_picture,
    require_writable_file,
    write_figures,
)
from lbbsp_core.cli.progress import countdown
from lbbsp_core.sim import Trace, read_trace
from lbbsp_core.sim.backtest import DEFAULT, Evaluation, contenders
from lbbsp_core.sim.backtest import evaluate as run_evaluation


@one_line_errors
def evaluate(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Trace files in CSV format.")
    ],
    horizon: Annotated[
        int, typer.Option(min=1, help="Iterations ahead to forecast; 1 is the next iteration.")
    ] = 1,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures to this JSON file."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw forecasts and measured speeds to this image file."),
    ] = None,
) -> None:
    """Score speed predictors on recorded traces.

    In each iteration a predictor forecasts, is scored, then learns. The RMSE is that of speed /
    mean speed; the first fifth of each series is not scored.
    """
    out, err = Console(), Console(stderr=True)
    require_writable_file("--json", json_file)
    require_picture("--plot", plot)
    loaded = [read_trace(path) for path in traces]
    for trace in loaded:
        for note in trace.notes:
            err.print(f"{trace.path}: {note}", style="yellow", markup=False)
    result = _run(err, loaded, horizon)
    _print(out, result)
    if json_file is not None:
        write_figures(json_file, result.figures())
    if plot is not None:
        from lbbsp_core.report.forecasts import plot_forecasts

        plot_forecasts(result, plot)
        out.print(f"plot written to {plot}", markup=False)


def _run(err: Console, traces: list[Trace], horizon: int) -> Evaluation:
    predictors = contenders(horizon)
    if "arima" not in predictors:
        err.print(
            "arima is left out because statsmodels is not installed: pip install 'lbbsp[arima]'",
            style="yellow",
            markup=False,
        )
    total = len(predictors) * sum(len(series) for trace in traces for series in trace.series)
    with countdown(err) as bar:
        task = bar.add_task("", total=total)

        def advance(file: str, name: str, iterations: int) -> None:
            bar.update(task, advance=iterations, description=escape(f"{file} {name}"))

        return run_evaluation(traces, predictors=predictors, horizon=horizon, progress=advance)


def _print(out: Console, result: Evaluation) -> None:
    errors = Table(title=f"RMSE of speed / mean speed, horizon {result.horizon}", box=SIMPLE_HEAD)
    errors.add_column("predictor", no_wrap=True)
    for file in result.scores:
        title = file.removesuffix(".csv").replace("_", " ")  # breaks at spaces in a narrow terminal
        errors.add_column(escape(title), justify="right", overflow="fold")
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


def _label(name: str) -> str:
    return f"{name} (default)" if name == DEFAULT else name
