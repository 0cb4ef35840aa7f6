"""`lbbsp evaluate`: predictors on recorded traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lbbsp_core.cli.progress import countdown
from lbbsp_core.sim import Trace, TraceError, read_trace
from lbbsp_core.sim.backtest import DEFAULT, Evaluation, contenders
from lbbsp_core.sim.backtest import evaluate as run_evaluation


def evaluate(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="CSV trace files.")],
    horizon: Annotated[int, typer.Option(min=1, help="Iterations ahead; 1 is the next.")] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw prediction against truth here.")
    ] = None,
) -> None:
    """Score predictors of speed on recorded traces: predict, score, then learn.

    RMSE is that of speed / mean speed; the first fifth of each series is not scored.
    """
    out, err = Console(), Console(stderr=True)
    try:
        read = [read_trace(path) for path in traces]
        for trace in read:
            for note in trace.notes:
                err.print(f"{trace.path}: {note}", style="yellow", markup=False)
        result = _run(err, read, horizon)
    except TraceError as error:
        err.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    _print(out, result)
    if json_file is not None:
        json_file.write_text(json.dumps(result.figures(), indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        from lbbsp_core.report.forecasts import plot_forecasts

        plot_forecasts(result, plot)
        out.print(f"drawn to {plot}", markup=False)


def _run(err: Console, traces: list[Trace], horizon: int) -> Evaluation:
    predictors = contenders(horizon)
    if "arima" not in predictors:
        err.print("arima is left out: pip install 'lbbsp[arima]'", style="yellow", markup=False)
    total = len(predictors) * sum(len(series) for trace in traces for series in trace.series)
    with countdown(err) as bar:
        task = bar.add_task("", total=total)

        def advance(file: str, name: str, iterations: int) -> None:
            bar.update(task, advance=iterations, description=escape(f"{file} {name}"))

        return run_evaluation(traces, predictors=predictors, horizon=horizon, progress=advance)


def _print(out: Console, result: Evaluation) -> None:
    errors = Table(title=f"RMSE of speed / mean speed, {result.horizon} ahead", box=SIMPLE_HEAD)
    errors.add_column("predictor", no_wrap=True)
    for file in result.scores:
        words = file.removesuffix(".csv").replace("_", " ")  # where a narrow terminal may break it
        errors.add_column(escape(words), justify="right", overflow="fold")
    errors.add_column("geometric mean", justify="right", overflow="fold")
    least = {file: min(s.rmse for s in scores.values()) for file, scores in result.scores.items()}
    for name in result.predictors:
        cells = [
            f"[bold]{scores[name].rmse:.4f}[/]"
            if scores[name].rmse == least[file]
            else f"{scores[name].rmse:.4f}"
            for file, scores in result.scores.items()
        ]
        errors.add_row(_label(name), *cells, f"{result.geometric_mean_rmse(name):.4f}")
    out.print(errors)
    costs = Table(title="MAPE, and microseconds of thread CPU time: means of traces, worst tail")
    for column in ("predictor", "MAPE", "update", "predict", "99.9th percentile"):
        costs.add_column(column, justify="left" if column == "predictor" else "right")
    for name in result.predictors:
        own = [scores[name] for scores in result.scores.values()]
        mape, update, predict = (
            sum(values) / len(own)
            for values in zip(*((s.mape, s.update_us, s.predict_us) for s in own), strict=True)
        )
        tail = max(score.p999_us for score in own)
        costs.add_row(_label(name), f"{mape:.1%}", f"{update:.1f}", f"{predict:.1f}", f"{tail:.0f}")
    out.print(costs)


def _label(name: str) -> str:
    return f"{name} (default)" if name == DEFAULT else name
