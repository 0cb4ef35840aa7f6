"""Backtest of predictors on recorded speeds: forecast errors, step time and CPU time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from lbbsp_core.predict import Predictor
from lbbsp_core.predict.estimator import SLOWEST, is_speed
from lbbsp_core.registry import PREDICTORS
from lbbsp_core.sim.efficiency import efficiencies
from lbbsp_core.sim.traces import Series, Trace, TraceError, names_of
from lbbsp_core.types import Floats
from lbbsp_core.validate import require_integer

Progress = Callable[[str, str, int], None]
"""Called with a file's name, a predictor's name and a number of further iterations done."""

DEFAULT = "mixture"
"""Default predictor of the plugins, by its name in `contenders`."""

WARM_UP = 5
"""The first 1 / WARM_UP of each series is learned from, but not scored."""


@dataclass(frozen=True, slots=True)
class Score:
    """Errors, efficiency and CPU time of one predictor on one trace."""

    # root mean squared error of a worker's speed / its mean speed, averaged over workers
    rmse: float
    mape: float  # mean of abs(error) / speed of a worker, averaged over workers; a fraction
    update_us: float  # mean thread CPU time of an update, in microseconds
    predict_us: float  # mean thread CPU time of a forecast, in microseconds
    p999_us: float  # 99.9th percentile of update + forecast, in microseconds
    # time of an oracle / time of all workers together, balanced by the forecasts, see
    # `lbbsp_core.sim.efficiency`; None where they cannot be replayed, such as a single worker, or
    # workers without common steps
    efficiency: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Scores of all predictors on all traces."""

    horizon: int  # number of iterations ahead that were forecast
    # scores by file and predictor
    scores: dict[str, dict[str, Score]] = field(default_factory=dict)
    # forecasts by file and predictor, one array per worker; NaN where there is no forecast
    forecasts: dict[str, dict[str, tuple[Floats, ...]]] = field(default_factory=dict)
    # reason why there are no efficiencies, by file
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def predictors(self) -> tuple[str, ...]:
        """Names of the predictors, in the order of evaluation."""
        return tuple(next(iter(self.scores.values()), {}))

    def geometric_mean_rmse(self, predictor: str) -> float:
        """Returns the geometric mean of a predictor's RMSE over the traces."""
        values = [scores[predictor].rmse for scores in self.scores.values()]
        if not all(value > 0 for value in values):
            return 0.0 if 0.0 in values else math.nan
        return math.exp(sum(map(math.log, values)) / len(values))

    def mean_efficiency(self, predictor: str) -> float | None:
        """Returns the mean of a predictor's efficiency over the traces that have one, or None."""
        of_traces = [scores[predictor].efficiency for scores in self.scores.values()]
        values = [value for value in of_traces if value is not None]
        return sum(values) / len(values) if values else None

    def figures(self) -> dict[str, object]:
        """Returns the figures that ``lbbsp evaluate --json`` writes."""
        return {
            "default": DEFAULT,
            "horizon": self.horizon,
            "traces": {
                file: {name: asdict(score) for name, score in scores.items()}
                for file, scores in self.scores.items()
            },
            "geometric_mean_rmse": {
                name: self.geometric_mean_rmse(name) for name in self.predictors
            },
            "mean_efficiency": {name: self.mean_efficiency(name) for name in self.predictors},
        }


def contenders(horizon: int = 1) -> dict[str, Predictor]:
    """Returns the predictors to compare, by name; trainable ones are trained for `horizon`.

    ``arima`` is left out if statsmodels (of the extra "arima") is not installed.
    """
    available = (name for name, component in PREDICTORS.items() if component.is_available)
    return {name: PREDICTORS.build(name, horizon=horizon) for name in available}


def evaluate(
    traces: Sequence[Trace],
    *,
    predictors: Mapping[str, Predictor] | None = None,
    horizon: int = 1,
    progress: Progress | None = None,
) -> Evaluation:
    """Replays each worker's series through each predictor: forecast, score, then learn.

    Before iteration k a predictor knows the measurements of all earlier iterations and the
    driving factors of iteration k; it forecasts iteration ``k + horizon - 1``. Then all workers of
    a trace are replayed together, with plans that follow from these forecasts.

    Example:
        >>> from pathlib import Path
        >>> from lbbsp_core import LastValue, Measurement
        >>> series = Series(0, np.arange(20), (Measurement(10, 0.5),) * 20)
        >>> trace = Trace(Path("steady.csv"), (), (series,))
        >>> result = evaluate([trace], predictors={"last": LastValue()})
        >>> result.scores["steady.csv"]["last"].rmse
        0.0
    """
    if not traces:
        raise ValueError("evaluate needs at least one trace, got none: name a trace file")
    require_integer("horizon", horizon, 1)
    predictors = contenders(horizon) if predictors is None else predictors
    fewest = 2 * (WARM_UP + horizon)
    for trace in traces:
        for series in trace.series:
            if len(series) < fewest:
                raise TraceError(
                    f"{trace.path}: worker {series.worker} has {len(series)} steps, at least "
                    f"{fewest} are needed to score a horizon of {horizon}: record more, or remove "
                    "this worker's rows"
                )
    result = Evaluation(horizon)
    for file, trace in zip(names_of(traces), traces, strict=True):
        speeds = [series.speeds for series in trace.series]
        result.scores[file], result.forecasts[file] = {}, {}
        for name, predictor in predictors.items():
            runs = []
            for series in trace.series:
                runs.append(_replay(predictor, series, horizon))
                _check(runs[-1][0], f"{name!r} for worker {series.worker} of {file}", series)
                if progress is not None:
                    progress(file, name, len(series))
            result.forecasts[file][name] = tuple(forecast for forecast, _ in runs)
            result.scores[file][name] = _score(speeds, runs)
        _add_efficiencies(result, file, trace)
    return result


def _add_efficiencies(result: Evaluation, file: str, trace: Trace) -> None:
    """Adds the efficiencies of a trace to its scores, or a note if there are none."""
    scores = result.scores[file]
    try:
        efficiency_by_name = efficiencies(trace, result.forecasts[file], result.horizon)
    except ValueError as error:  # also of batches too small to divide
        result.notes[file] = f"no efficiency is computed: {error}"
        return
    for name, efficiency in efficiency_by_name.items():
        scores[name] = replace(scores[name], efficiency=efficiency)


def _replay(predictor: Predictor, series: Series, horizon: int) -> tuple[Floats, Floats]:
    """Returns forecasts, and nanoseconds of updates and forecasts, shape ``(2, iterations)``."""
    forecasts = np.full(len(series), math.nan)
    nanoseconds = np.zeros((2, len(series)))
    clock = time.thread_time_ns
    state = predictor.init()
    for k, measurement in enumerate(series.measurements):
        start = clock()
        forecast = predictor.predict(state, measurement.drivers, horizon)
        forecast_end = clock()
        state = predictor.update(state, measurement)
        nanoseconds[:, k] = clock() - forecast_end, forecast_end - start
        if k + horizon - 1 < len(series):
            forecasts[k + horizon - 1] = forecast
    return forecasts, nanoseconds


def _check(forecasts: Floats, whose: str, series: Series) -> None:
    """Raises an error that names the first of the scored forecasts that is no speed."""
    first = len(series) // WARM_UP
    for step, forecast in zip(series.steps[first:], forecasts[first:].tolist(), strict=True):
        if not is_speed(forecast):
            raise ValueError(
                f"a forecast must be a finite number of samples per second, at least "
                f"{SLOWEST:g}, got {forecast!r} from {whose}, step {step}: training would ignore it"
            )


def _score(speeds: Sequence[Floats], runs: Sequence[tuple[Floats, Floats]]) -> Score:
    rmse, mape = [], []
    for speed, (forecast, _) in zip(speeds, runs, strict=True):
        first = len(speed) // WARM_UP
        truth, error = speed[first:], forecast[first:] - speed[first:]
        rmse.append(math.sqrt(np.mean(error**2)) / truth.mean())
        mape.append(np.mean(np.abs(error) / truth))
    nanoseconds = np.concatenate([elapsed for _, elapsed in runs], axis=1)
    update_us, predict_us = nanoseconds.mean(axis=1) / 1e3
    p999_us = np.percentile(nanoseconds.sum(axis=0), 99.9) / 1e3
    figures = np.mean(rmse), np.mean(mape), update_us, predict_us, p999_us
    return Score(*map(float, figures))
