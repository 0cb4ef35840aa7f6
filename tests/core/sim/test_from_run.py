"""Traces of recorded runs: their steps, speeds and drivers, and the command on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from report_runs import header, line, save
from typer.testing import CliRunner

from lbbsp_core import Measurement, Narx
from lbbsp_core.cli.app import application
from lbbsp_core.runtime.record.record import Run, StepLine, read_run
from lbbsp_core.sim import Series, Trace, read_trace, trace_from_run, write_trace
from lbbsp_core.sim.backtest import evaluate
from lbbsp_core.sim.from_run import cluster_from_run

NAMES = ("load", "gpu")
Drivers = tuple[tuple[float | None, ...], ...]
"""Values of `NAMES` by rank."""


def line_of(step: int, drivers: Drivers = (), **changes: Any) -> StepLine:
    """Returns a step of two workers, whose sizes and times depend on the step and the rank."""
    sizes, busy = (8 + step % 3, 8 - step % 3), (0.1 + step / 7, 0.2 + step / 3)
    named = dict(zip(NAMES, zip(*drivers, strict=True), strict=False))
    return replace(line(step, sizes, busy, 9.0, drivers=named), **changes)


def write(folder: Path, lines: Sequence[StepLine], names: tuple[str, ...] = NAMES) -> Path:
    return save(folder, Run(header(len(lines[0].sizes), 16, drivers=names), list(lines)))


def test_each_worker_has_its_own_speeds_and_drivers(tmp_path: Path) -> None:
    lines = [line_of(k, ((k / 9, 1.0), (k / 7, 2.0))) for k in range(6)]
    trace = trace_from_run(write(tmp_path / "plain", lines))
    assert read_run(tmp_path / "plain").steps == lines
    assert (trace.path.name, trace.drivers) == ("plain", ("load", "gpu"))
    for rank, series in enumerate(trace.series):
        assert (series.worker, series.steps.tolist()) == (rank, list(range(6)))
        assert list(series.measurements) == [
            Measurement(
                line.sizes[rank],
                line.busy_seconds[rank],
                tuple(line.drivers[name][rank] for name in NAMES),
            )
            for line in lines
        ]
    assert len(trace.notes) == 1
    assert "the batch sizes change" in trace.notes[0]


def test_speeds_are_in_units_of_work_where_it_is_known(tmp_path: Path) -> None:
    lines = [line_of(k, work=(40.0 + k, 50.0 - k)) for k in range(6)]
    path = write(tmp_path / "plain", lines)
    trace, replayed = trace_from_run(path), cluster_from_run(path)
    for rank, series in enumerate(trace.series):
        expected = [line.work[rank] / line.busy_seconds[rank] for line in lines]
        assert [m.samples_per_second for m in series.measurements] == pytest.approx(expected)
        assert replayed.cluster.speeds[:, rank] == pytest.approx(expected)
    assert replayed.cluster.global_batch_size == 90
    assert not any("batch sizes change" in note for note in trace.notes)


def test_steps_that_show_no_speed_or_no_drivers_are_left_out(tmp_path: Path) -> None:
    known: Drivers = ((1.0, 2.0), (3.0, 4.0))
    lines = [line_of(k, known if k else ()) for k in range(12)]
    lines[4] = line_of(4, known, excluded=(1,))
    lines[5] = line_of(5, known, short=True)
    lines[6] = line_of(6, known, busy_seconds=(0.1, 0.0))
    trace = trace_from_run(write(tmp_path, lines))
    for series in trace.series:
        assert series.steps.tolist() == [1, 2, 3, 7, 8, 9, 10, 11]
    assert "steps left out because they were excluded or short: 3" in trace.notes
    assert "steps left out because their driving factors are unknown: 1" in trace.notes


def test_a_factor_that_a_worker_lacks_is_zero_or_keeps_its_last_value(tmp_path: Path) -> None:
    lines = [
        line_of(k, ((None if k in (0, 3) else 10.0 + k, None), (1.0, None if k == 2 else 5.0)))
        for k in range(6)
    ]
    trace = trace_from_run(write(tmp_path, lines))
    first, second = ([m.drivers for m in series.measurements] for series in trace.series)
    assert first == [(x, 0.0) for x in (0.0, 11.0, 12.0, 12.0, 14.0, 15.0)]
    assert second == [(1.0, 5.0)] * 6
    assert "gpu is 0 for workers that do not have it: 0" in trace.notes
    assert not any(note.startswith("load") for note in trace.notes)


def test_a_factor_that_only_other_workers_than_the_first_have(tmp_path: Path) -> None:
    lines = [line_of(k, ((1.0, None), (2.0, 3.0))) for k in range(6)]
    trace = trace_from_run(write(tmp_path, lines, ("load",)))
    assert trace.drivers == ("load", "gpu")
    assert [series.measurements[5].drivers for series in trace.series] == [(1.0, 0.0), (2.0, 3.0)]


def test_a_record_without_drivers_has_no_columns(tmp_path: Path) -> None:
    trace = trace_from_run(write(tmp_path / "old", [line_of(k) for k in range(6)]))
    assert trace.drivers == ()
    assert {m.drivers for series in trace.series for m in series.measurements} == {()}
    assert "no step has driving factors: predictors learn from the speeds only" in trace.notes
    none = trace_from_run(write(tmp_path / "none", [line_of(k) for k in range(6)], ()))
    assert not any("driving factors" in note for note in none.notes)


def test_a_single_worker_is_a_trace_but_no_cluster(tmp_path: Path) -> None:
    single = {"sizes": (8,), "busy_seconds": (0.5,), "predicted_seconds": (None,)}
    path = write(tmp_path, [line_of(k, **single) for k in range(6)])
    assert len(trace_from_run(path).series) == 1
    with pytest.raises(ValueError, match="a single worker waits for no other worker"):
        cluster_from_run(path)


def test_records_that_tell_too_little(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no run record"):
        cluster_from_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match="only 4 of 4 steps are usable, at least 5"):
        cluster_from_run(write(tmp_path / "short", [line_of(k) for k in range(4)]))
    changing = write(tmp_path / "changing", [line_of(k) for k in range(9)])
    assert "no plain BSP run" in cluster_from_run(changing).cluster.notes[0]


# Trace files


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    numbers = (random.random((2, 9, 2)) * 10.0 ** random.integers(-9, 9, (2, 9, 2))).tolist()
    trace = Trace(
        tmp_path / "deep" / "out.csv",
        ("load, all", 'a "quoted" name'),
        tuple(
            Series(
                worker,
                np.arange(3, 30, 3),
                tuple(Measurement(8 + k, own[k][0], (own[k][1], -0.0)) for k in range(9)),
            )
            for worker, own in enumerate(numbers)
        ),
    )
    write_trace(trace.path, trace)
    write_trace(trace.path, trace)
    found = read_trace(trace.path)
    assert found.drivers == trace.drivers
    for own, expected in zip(found.series, trace.series, strict=True):
        assert own.worker == expected.worker
        assert own.steps.tolist() == expected.steps.tolist()
        assert own.measurements == expected.measurements
    assert [path.name for path in trace.path.parent.iterdir()] == ["out.csv"]


@pytest.mark.parametrize("name", ["", "step", " load", "twice"])
def test_a_driver_that_cannot_be_a_column(tmp_path: Path, name: str) -> None:
    series = Series(0, np.arange(1), (Measurement(8, 0.5, (1.0, 2.0)),))
    trace = Trace(tmp_path / "out.csv", (name, "twice"), (series,))
    with pytest.raises(ValueError, match="cannot be the name of a column"):
        write_trace(trace.path, trace)
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old")
    broken = Series(0, np.arange(2), (Measurement(8, 0.5),))  # a step without a measurement
    with pytest.raises(ValueError, match="zip"):
        write_trace(path, Trace(path, (), (broken,)))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# The command


def run(*words: str) -> Any:
    return CliRunner().invoke(application(), list(words))


def test_commands_evaluate_export_and_replay_runs_with_their_drivers(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lines = []
    for k in range(80):
        load = (random.random(2) < 0.4).astype(float)
        busy = tuple((0.1 * (1 + load) * np.exp(random.normal(0, 0.02, 2))).tolist())
        drivers = tuple((x, None) for x in load.tolist())
        times = {"busy_seconds": busy, "wall_seconds": max(busy)}
        lines.append(line_of(k, drivers, sizes=(8, 8), **times))
    write(tmp_path / "mine", lines)
    files = [str(tmp_path / name) for name in ("mine", "mine.csv", "out.json")]
    arguments = ["--from-run", files[0], "--predictors", "last,narx", "--json", files[2]]

    def figures_of(*words: str) -> tuple[str, dict[str, Any]]:
        result = run(*words, *arguments)
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split()), json.loads(Path(files[2]).read_text())

    output, alone = figures_of("evaluate", "--export", files[1])
    assert "gpu is 0 for workers that do not have it: 0, 1" in output
    _, both = figures_of("evaluate", files[1])
    for name in ("last", "narx"):
        for key in ("rmse", "mape", "efficiency"):
            expected = alone["traces"]["mine"][name][key]
            assert both["traces"]["mine"][name][key] == expected
            assert both["traces"]["mine.csv"][name][key] == expected
    scores = alone["traces"]["mine"]
    assert scores["narx"]["rmse"] < 0.5 * scores["last"]["rmse"], "the load is known"
    assert scores["narx"]["efficiency"] > scores["last"]["efficiency"] + 0.1
    _, replayed = figures_of("simulate", "--policies", "observe,lbbsp")
    found = {(row["policy"], row["predictor"]): row["efficiency"] for row in replayed["rows"]}
    assert found["lbbsp", "narx"] > found["lbbsp", "last"] + 0.1, "the load is known here, too"
    assert found["observe", "narx"] == found["observe", "last"] < found["lbbsp", "narx"]
    trace = trace_from_run(tmp_path / "mine")
    expected = evaluate([trace], predictors={"narx": Narx()}).scores["mine"]["narx"].rmse
    assert scores["narx"]["rmse"] == expected


def test_export_needs_exactly_one_run(tmp_path: Path) -> None:
    write(tmp_path / "run", [line_of(k) for k in range(20)])
    twice = 2 * ["--from-run", str(tmp_path / "run")]
    result = run("evaluate", *twice, "--export", str(tmp_path / "out.csv"))
    assert result.exit_code == 2
    assert "--export writes one run, got 2" in result.output.replace("\n", " ")
