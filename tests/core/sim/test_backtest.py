"""`evaluate`: scores by hand, the command, and scores on recorded traces."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import made_traces
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from lbbsp_core import Ema, LastValue, Measurement, Narx, Proportional, allocate
from lbbsp_core.cli.evaluate import evaluate as command
from lbbsp_core.registry import PREDICTORS
from lbbsp_core.sim import Series, Trace, TraceError, backtest, read_trace, write_trace
from lbbsp_core.sim.backtest import DEFAULT, contenders, evaluate

TRACES = Path(__file__).parents[3] / "traces"
trace_of = partial(made_traces.trace_of, samples=None)


class Seen(NamedTuple):
    count: int


class Spy:
    """Predictor that encodes its knowledge: 1000 * updates + driver + horizon / 10."""

    def init(self) -> Seen:
        return Seen(0)

    def update(self, state: Seen, measurement: Measurement) -> Seen:
        return Seen(state.count + 1)

    def predict(self, state: Seen, drivers: tuple[float, ...] = (), horizon: int = 1) -> float:
        return 1000 * state.count + drivers[0] + horizon / 10


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_forecasts_know_what_is_known_before_the_iteration_and_no_more(horizon: int) -> None:
    result = evaluate([trace_of([1.0] * 20)], predictors={"spy": Spy()}, horizon=horizon)
    (forecasts,) = result.forecasts["made.csv"]["spy"]
    assert np.isnan(forecasts[: horizon - 1]).all()
    for k in range(horizon - 1, 20):
        known = k - horizon + 1
        assert forecasts[k] == pytest.approx(1001 * known + horizon / 10)


@dataclass(frozen=True)
class Stuck(Spy):
    """Forecasts no speed from some step on."""

    forecast: float = math.nan

    def predict(self, state: Seen, drivers: tuple[float, ...] = (), horizon: int = 1) -> float:
        return 1000.0 if state.count < 15 else self.forecast


@pytest.mark.parametrize("forecast", [math.nan, math.inf, 0.0, -1.0, 1e-300])
def test_a_scored_forecast_that_is_no_speed_is_refused(forecast: float) -> None:
    named = f"got {forecast} from 'stuck' for worker 0 of made.csv, step 15"
    with pytest.raises(ValueError, match=named):
        evaluate([trace_of([1.0] * 20)], predictors={"stuck": Stuck(forecast)})


def test_scores_by_hand_the_first_fifth_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = accumulate(cycle([0, 2000, 5000]))  # a forecast takes 2 us, an update 5 us
    monkeypatch.setattr(backtest, "time", SimpleNamespace(thread_time_ns=clock.__next__))
    speeds = [5.0, 7.0, 900.0, *[10.0, 20.0] * 6]
    score = evaluate([trace_of(speeds)], predictors={"last": LastValue()}).scores["made.csv"][
        "last"
    ]
    errors = np.array([890.0, *[10.0] * 11])
    assert score.rmse == pytest.approx(math.sqrt(np.mean(errors**2)) / 15)
    relative = errors / np.array([10, 20] * 6)
    assert score.mape == pytest.approx(relative.mean())
    assert (score.update_us, score.predict_us, score.p999_us) == (5, 2, 7)


def test_workers_are_averaged_and_traces_geometrically() -> None:
    steady, alternating = [10.0] * 20, [10.0, 30.0] * 10
    result = evaluate(
        [trace_of(steady, alternating), trace_of(alternating, name="other.csv")],
        predictors={"last": LastValue()},
    )
    assert result.scores["made.csv"]["last"].rmse == pytest.approx((0 + 1) / 2)
    assert result.scores["other.csv"]["last"].rmse == pytest.approx(1)
    assert result.geometric_mean_rmse("last") == pytest.approx(math.sqrt(0.5))


# Efficiency


def uneven(steps: int = 40, missing: tuple[int, ...] = ()) -> Trace:
    """Returns three workers with random speeds around 300, 600 and 900 samples per second."""
    random = np.random.default_rng(0)
    factors = np.exp(random.normal(0, 0.3, (3, steps)))
    trace = trace_of(*(factors * [[300.0], [600.0], [900.0]]).tolist())
    kept = [k for k in range(steps) if k not in missing]
    lacking = trace.series[1]
    short = Series(1, lacking.steps[kept], tuple(lacking.measurements[k] for k in kept))
    return replace(trace, series=(trace.series[0], short, trace.series[2]))


def by_brute_force(trace: Trace, forecasts: tuple[np.ndarray, ...]) -> float:
    """Plans each step that all workers have from the forecasts of this step."""
    speeds, known = (
        [dict(zip(own.steps.tolist(), values, strict=True)) for own, values in pairs]
        for pairs in (
            [(own, own.speeds) for own in trace.series],
            list(zip(trace.series, forecasts, strict=True)),
        )
    )
    steps = [k for k in range(len(trace.series[0])) if all(k in own for own in speeds)]
    total = round(float(np.median([sum(own[k] for own in speeds) for k in steps])))

    def seconds(sizes: Any, at: list[float]) -> float:
        return max(x / v for x, v in zip(sizes, at, strict=True))

    plan = allocate([Proportional()] * 3, total=total)
    spent = best = 0.0
    for k in steps:
        now, forecast = [own[k] for own in speeds], [float(own[k]) for own in known]
        if not any(map(math.isnan, forecast)):
            new = allocate([Proportional(v) for v in forecast], total=total)
            if seconds(plan, forecast) - seconds(new, forecast) > 0.02 * seconds(plan, forecast):
                plan = new
        spent += seconds(plan, now)
        best += seconds(allocate([Proportional(v) for v in now], total=total), now)
    return best / spent


@pytest.mark.parametrize("horizon", [1, 3])
@pytest.mark.parametrize("missing", [(), (7, 20, 21)], ids=["complete", "missing"])
def test_plans_of_a_step_follow_from_its_forecasts(horizon: int, missing: tuple[int, ...]) -> None:
    trace, predictors = uneven(missing=missing), {"last": LastValue(), "ema": Ema(0.3)}
    result = evaluate([trace], predictors=predictors, horizon=horizon)
    found = {}
    for name in predictors:
        expected = by_brute_force(trace, result.forecasts["made.csv"][name])
        found[name] = result.scores["made.csv"][name].efficiency
        assert found[name] == pytest.approx(expected, abs=1e-9)
        assert result.mean_efficiency(name) == found[name]
    assert found["last"] < found["ema"] < 1, "independent slowdowns are better averaged"
    assert not result.notes


def test_without_common_steps_there_is_no_efficiency_but_a_note() -> None:
    even, odd = trace_of([10.0] * 40).series[0], trace_of([10.0] * 40).series[0]
    apart = (
        Series(0, 2 * even.steps, even.measurements),
        Series(1, 2 * odd.steps + 1, odd.measurements),
    )
    traces = [
        trace_of([10.0] * 20, name="alone.csv"),
        Trace(Path("apart.csv"), ("index",), apart),
        trace_of([0.1] * 20, [0.2] * 20, name="small.csv"),
        uneven(),
    ]
    result = evaluate(traces, predictors={"last": LastValue()})
    found = {file: scores["last"].efficiency for file, scores in result.scores.items()}
    assert [file for file, value in found.items() if value is None] == list(result.notes)
    for file, reason in {
        "alone.csv": "single worker",
        "apart.csv": "only 0 of 80 steps",
        "small.csv": "must be an integer >= 1",
    }.items():
        assert reason in result.notes[file]
    assert result.mean_efficiency("last") == found["made.csv"]
    only = evaluate(traces[:1], predictors={"last": LastValue()})
    assert only.figures()["mean_efficiency"] == {"last": None}


def test_files_of_one_name_are_distinguished() -> None:
    traces = [trace_of([1.0] * 20, name=name) for name in ("a/x.csv", "b/x.csv", "y.csv")]
    result = evaluate(traces, predictors={"last": LastValue()})
    assert list(result.scores) == [str(Path("a/x.csv")), str(Path("b/x.csv")), "y.csv"]


def test_bad_calls_name_the_cure() -> None:
    with pytest.raises(ValueError, match="at least one trace"):
        evaluate([])
    with pytest.raises(ValueError, match="horizon must be an integer >= 1"):
        evaluate([trace_of([1.0] * 20)], horizon=0)
    with pytest.raises(TraceError, match=r"made.csv: worker 0 has 11 steps, at least 12"):
        evaluate([trace_of([1.0] * 11)])


def test_contenders_have_the_names_that_stay() -> None:
    pytest.importorskip("statsmodels")
    assert list(contenders()) == list(PREDICTORS)
    assert contenders(2)["narx"] == Narx(horizon=2)
    assert DEFAULT in PREDICTORS


def test_without_statsmodels_arima_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(contenders()) == [name for name in PREDICTORS if name != "arima"]


# The command


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_command_prints_and_writes_figures_of_the_named_predictors(tmp_path: Path) -> None:
    lines = [f"0,{k},32,{0.5 + k % 3}" for k in (1, 0, *range(2, 30), 40)]
    (tmp_path / "a[b].csv").write_text("worker,step,samples,busy_seconds\n" + "\n".join(lines))
    write_trace(tmp_path / "three.csv", uneven())
    files = [str(tmp_path / name) for name in ("three.csv", "a[b].csv", "out.json")]
    names = ["last", DEFAULT, "narx:hidden=0"]
    given = ["--predictors", ", ".join(names), "--horizon", "2", "--json", files[2]]
    result = run(*files[:2], *given)
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.split())  # lines are wrapped
    for text in ("RMSE", "geometric mean", f"{DEFAULT} (default)", "sorted by step", *names):
        assert text in output
    assert "single worker" in output
    figures: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert figures["default"] == DEFAULT
    three, alone = (figures["traces"][name] for name in ("three.csv", "a[b].csv"))
    assert set(alone["last"]) == {
        "rmse", "mape", "update_us", "predict_us", "p999_us", "efficiency",
    }  # fmt: skip
    assert list(figures["mean_efficiency"]) == list(three) == names
    for name, mean in figures["mean_efficiency"].items():
        assert mean == three[name]["efficiency"]
        assert f"{mean:.4f}" in output
        assert alone[name]["efficiency"] is None
        errors = three[name]["rmse"] * alone[name]["rmse"]
        assert figures["geometric_mean_rmse"][name] == pytest.approx(math.sqrt(errors))


@pytest.mark.parametrize(
    ("row", "predictors", "message"),
    [
        ("0,0,32,soon", "last", "line 2, column 'busy_seconds'"),
        ("0,0,32,1", "last, ema:alpha=0.3", "no predictor 'ema': did you mean 'ema0.5'?"),
    ],
)
def test_command_ends_with_2_and_one_line_on_what_is_wrong(
    tmp_path: Path, row: str, predictors: str, message: str
) -> None:
    (tmp_path / "one.csv").write_text(f"worker,step,samples,busy_seconds\n{row}\n")
    result = run(str(tmp_path / "one.csv"), "--predictors", predictors)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


# Real contention


ALL_WORKERS = pytest.param(None, marks=pytest.mark.campaign)


def scores_of(name: str, predictors: Sequence[str], workers: int | None, horizon: int = 1) -> Any:
    """Returns the scores of predictors on the first workers of a recorded trace."""
    trace = read_trace(TRACES / name)
    chosen = {each: contenders(horizon)[each] for each in predictors}
    some = replace(trace, series=trace.series[:workers])
    return evaluate([some], predictors=chosen, horizon=horizon).scores[name]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, ALL_WORKERS])
def test_narx_wins_where_neighbours_come_and_go(workers: int | None) -> None:
    names = ("last", "ema0.5", "rnn", "narx", "narx-without-drivers", "mixture")
    scores = scores_of("contention_bursty.csv", names, workers)
    assert scores["narx"].rmse < 0.9 * scores["narx-without-drivers"].rmse
    assert scores["narx"].rmse < 0.9 * min(scores[n].rmse for n in ("last", "ema0.5", "rnn"))
    assert scores["mixture"].rmse < 1.03 * min(score.rmse for score in scores.values())


@pytest.mark.parametrize("workers", [1, ALL_WORKERS])
@pytest.mark.parametrize("horizon", [1, 3])
def test_default_is_near_the_best_at_every_horizon(horizon: int, workers: int | None) -> None:
    names = ("last", "ema0.2", "ema0.5", "narx", "narx-without-drivers", "mixture")
    scores = scores_of("contention_coarse.csv", names, workers, horizon)
    assert scores["mixture"].rmse < 1.03 * min(score.rmse for score in scores.values())
