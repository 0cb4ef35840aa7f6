"""Evaluate: how well predictors forecast recorded speeds, and what they cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lbbsp_core import registry
from lbbsp_core.predict import Predictor
from lbbsp_core.sim.traces import Series, Trace, TraceError, names_of

Array = npt.NDArray[np.float64]
Progress = Callable[[str, str, int], None]
"""Told of a file, a predictor's name and a number of iterations just done."""

DEFAULT = "mixture"
"""The predictor of both plugins, by its name in `contenders`."""

UNSCORED = 5
"""The first 1 / UNSCORED of each series is learned from, but not scored."""


@dataclass(frozen=True, slots=True)
class Score:
    """Of one predictor on one trace.

    Args:
        rmse: Root of the mean squared error of speed / mean speed of a worker, mean of workers.
        mape: Mean of abs(error) / speed of a worker, mean of workers; a fraction.
        update_us: Mean thread CPU time of an update, microseconds.
        predict_us: Mean thread CPU time of a forecast, microseconds.
        p999_us: 99.9th percentile of update + forecast, microseconds.
    """

    rmse: float
    mape: float
    update_us: float
    predict_us: float
    p999_us: float


@dataclass(frozen=True)
class Evaluation:
    """The scores of all predictors on all traces.

    Args:
        horizon: Iterations ahead that were forecast.
        scores: By file and predictor.
        speeds: Measured samples per second, by file, one array a worker.
        forecasts: By file and predictor, aligned with `speeds`; NaN where there is none.
    """

    horizon: int
    scores: dict[str, dict[str, Score]] = field(default_factory=dict)
    speeds: dict[str, tuple[Array, ...]] = field(default_factory=dict)
    forecasts: dict[str, dict[str, tuple[Array, ...]]] = field(default_factory=dict)

    @property
    def predictors(self) -> tuple[str, ...]:
        """Names, in the order of evaluation."""
        return tuple(next(iter(self.scores.values()), {}))

    def geometric_mean_rmse(self, predictor: str) -> float:
        """Over the traces."""
        values = [scores[predictor].rmse for scores in self.scores.values()]
        if not all(value > 0 for value in values):
            return 0.0 if 0.0 in values else math.nan
        return math.exp(sum(map(math.log, values)) / len(values))

    def figures(self) -> dict[str, Any]:
        """What ``lbbsp evaluate --json`` writes."""
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
        }


def contenders(horizon: int = 1) -> dict[str, Predictor]:
    """The predictors that are compared, each trained for `horizon` where it can be.

    ``arima`` is left out where statsmodels is missing: ``pip install 'lbbsp[arima]'``.
    """
    return registry.predictors(horizon)


def evaluate(
    traces: Sequence[Trace],
    *,
    predictors: Mapping[str, Predictor] | None = None,
    horizon: int = 1,
    progress: Progress | None = None,
) -> Evaluation:
    """Replays each worker's series: forecast, score, then learn.

    Before iteration k a predictor knows the measurements of all earlier ones and the drivers of
    k, and forecasts iteration ``k + horizon - 1``.

    Args:
        traces: From `read_trace`.
        predictors: By name. Default `contenders`.
        horizon: Iterations ahead, >= 1.
        progress: Called after each series.

    Raises:
        ValueError: No traces, or a horizon below 1.
        TraceError: A series too short to score.

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
    if horizon < 1:
        raise ValueError(f"horizon must be >= 1, got {horizon}: 1 is the next iteration")
    predictors = contenders(horizon) if predictors is None else predictors
    for trace in traces:
        _check_length(trace, horizon)
    result = Evaluation(horizon)
    for file, trace in zip(names_of(traces), traces, strict=True):
        result.speeds[file] = tuple(series.speeds for series in trace.series)
        result.scores[file], result.forecasts[file] = {}, {}
        for name, predictor in predictors.items():
            runs = []
            for series in trace.series:
                runs.append(_replay(predictor, series, horizon))
                if progress is not None:
                    progress(file, name, len(series))
            result.forecasts[file][name] = tuple(forecast for forecast, _ in runs)
            result.scores[file][name] = _score(result.speeds[file], runs)
    return result


def _check_length(trace: Trace, horizon: int) -> None:
    for series in trace.series:
        if len(series) < 2 * (UNSCORED + horizon):
            raise TraceError(
                f"{trace.path}: worker {series.worker} has {len(series)} steps, at least "
                f"{2 * (UNSCORED + horizon)} are needed to score a horizon of {horizon}: record "
                "more, or remove this worker's rows"
            )


def _replay(predictor: Predictor, series: Series, horizon: int) -> tuple[Array, Array]:
    """Forecasts, and nanoseconds of each update and forecast, shape ``(2, iterations)``."""
    forecasts = np.full(len(series), math.nan)
    nanoseconds = np.zeros((2, len(series)))
    clock = time.thread_time_ns
    state = predictor.init()
    for k, measurement in enumerate(series.measurements):
        start = clock()
        forecast = predictor.predict(state, measurement.drivers, horizon)
        between = clock()
        state = predictor.update(state, measurement)
        nanoseconds[:, k] = clock() - between, between - start
        if k + horizon - 1 < len(series):
            forecasts[k + horizon - 1] = forecast
    return forecasts, nanoseconds


def _score(speeds: Sequence[Array], runs: Sequence[tuple[Array, Array]]) -> Score:
    rmse, mape = [], []
    for speed, (forecast, _) in zip(speeds, runs, strict=True):
        first = len(speed) // UNSCORED
        truth, error = speed[first:], forecast[first:] - speed[first:]
        rmse.append(math.sqrt(np.mean(error**2)) / truth.mean())
        mape.append(np.mean(np.abs(error) / truth))
    nanoseconds = np.concatenate([spent for _, spent in runs], axis=1)
    update_us, predict_us = nanoseconds.mean(axis=1) / 1e3
    p999_us = np.percentile(nanoseconds.sum(axis=0), 99.9) / 1e3
    return Score(
        *(float(x) for x in (np.mean(rmse), np.mean(mape), update_us, predict_us, p999_us))
    )
