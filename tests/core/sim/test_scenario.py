"""Scenarios and recorded runs, from Python and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from made_traces import trace_of
from report_runs import header, line, save
from typer.testing import CliRunner

from lbbsp_core import Affine, Limits, Profile
from lbbsp_core.cli.app import application
from lbbsp_core.runtime.record.record import Run
from lbbsp_core.sim import (
    PRESETS,
    Lognormal,
    ParameterServer,
    Preemption,
    RingAllReduce,
    Scenario,
    ServerLinks,
    cluster_from_run,
    load_scenario,
    write_trace,
)
from lbbsp_core.sim.experiment import chosen_runs, experiment_of, run_experiments
from lbbsp_core.sim.scenario import read_scenario

FILE = """
steps = 30
workers = 4
cores = "6/6/4/32"
samples_per_second = 4.0
[noise]
kind = "lognormal"
sigma = 0.2
[communication]
kind = "parameter-server"
bytes = 1e6
bytes_per_second = 1e8
"""


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(application(), ["simulate", *map(str, arguments)])


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


# Scenarios


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_run(name: str) -> None:
    scenario = load_scenario(name)
    small = read_scenario({**PRESETS[name], "steps": 10}, name)
    assert (scenario.name, small.cluster().steps) == (name, 10)
    assert small.cluster().workers == scenario.size == (3 if name.startswith("cores-") else 4)
    rows = [
        r.row
        for r in run_experiments([experiment_of(small)], chosen_runs(["bsp", "lbbsp"], ["last"]))
    ]
    assert [(row.kind, row.name) for row in rows] == [("scenario", name)] * 2
    assert all(row.total_seconds > 0 for row in rows)


def test_a_file_says_all(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(FILE)
    scenario = load_scenario(str(tmp_path / "mine.toml"))
    assert scenario.name == "mine"
    assert scenario.cores == (6.0, 6.0, 4.0, 32.0)
    assert scenario.noise == Lognormal(0.2)
    assert scenario.communication == ParameterServer(bytes=1e6, bytes_per_second=1e8)
    assert (scenario.size, scenario.total, scenario.steps) == (4, 256, 30)
    assert [round(1 / curve(1)) for curve in scenario.curves()] == [24, 24, 16, 128]
    arena = experiment_of(scenario)
    assert arena.together.links == arena.alone.links == ServerLinks(0.01, 0.01)


def test_lists_repeat_and_batches_grow_with_the_workers() -> None:
    scenario = Scenario("s", speeds=(1.0, 0.5), global_batch_size=100)
    assert (scenario.size, scenario.sized(6).size, scenario.sized(6).total) == (2, 6, 300)
    assert [curve(64) for curve in scenario.sized(5).curves()] == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert Scenario("s").sized(10).total == 640
    assert Scenario("s", overhead_seconds=0.5).curves() == [Affine(0.5, 1 / 64)] * 4
    spot = {"preemption": {"mean_up_seconds": 9.0, "mean_down_seconds": 1.0}}
    assert read_scenario(spot, "s").preemption == Preemption(9.0, 1.0)


def test_whole_numbers_may_be_floats() -> None:
    table = {"workers": 3.0, "steps": 2e1, "seed": 1.0, "steps_per_epoch": 5.0}
    scenario = read_scenario({**table, "global_batch_size": 96.0}, "s")
    assert repr((scenario.workers, scenario.steps, scenario.seed)) == "(3, 20, 1)"
    run_experiments([experiment_of(scenario)], chosen_runs(["bsp", "dbs"], ["last"]))


def test_profiles_give_curves_and_limits_and_are_given_to_the_balancers(tmp_path: Path) -> None:
    gpus = [Profile([8, 64], [0.05, 0.09], 200), Profile([8, 64], [0.1, 0.4])]
    for number, gpu in enumerate(gpus):
        pairs = zip(gpu.batches, gpu.seconds, strict=True)
        points = [{"batch": batch, "seconds": seconds} for batch, seconds in pairs]
        file = {"schema": 1, "points": points, "out_of_memory_at": gpu.out_of_memory_at}
        (tmp_path / f"gpu{number}.json").write_text(json.dumps(file))
    (tmp_path / "s.toml").write_text('profiles = ["gpu0.json", "gpu1.json"]\nsteps = 10\n')
    scenario = load_scenario(str(tmp_path / "s.toml"))
    assert scenario.curves() == gpus
    assert scenario.limits() == [Limits(1, 199), Limits()]
    runs = chosen_runs(["bsp", "lbbsp-every"], ["last"], syncs=["bsp", "asp"])
    bsp, lbbsp, *_ = [r.row for r in run_experiments([experiment_of(scenario)], runs)]
    assert bsp.efficiency < 0.5
    assert lbbsp.efficiency > 0.7  # all but the first step


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"worker": 3}, "there is no key 'worker': did you mean 'workers'"),
        ({"noise": {"kind": "lognormall"}}, "no noise.kind 'lognormall': did you mean 'lognormal'"),
        ({"noise": {"kind": "pareto", "alfa": 2}}, "no key of noise 'alfa': did you mean 'alpha'"),
        ({"noise": {"kind": "constant", "x": 2}}, "there is no key of noise 'x'"),
        ({"noise": {"sigma": 2}}, "noise must have a kind: one of constant"),
        ({"noise": 3}, r"noise must be a table, got 3: write \[noise\]"),
        (
            {"communication": {"kind": "ring"}},
            "communication has no bytes and bytes_per_second: add",
        ),
        ({"preemption": {"mean_up": 1}}, "did you mean 'mean_up_seconds'"),
        ({"speeds": [1], "cores": [1]}, "speeds and cores exclude each other"),
        ({"speeds": []}, "speeds must be a list with at least one entry"),
        ({"cores": "6/6/x"}, "cores must be a list with at least one entry, got '6/6/x'"),
        ({"cores": "12/x"}, "cores must be a list"),
        ({"speeds": [0.0]}, "speeds must be finite and > 0, got 0.0"),
        ({"serial_share": 0.1}, "serial_share needs cores, and none are given"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"workers": True}, "workers must be an integer >= 0, got True"),
        ({"workers": "x"}, "workers must be an integer"),
        ({"samples_per_second": -1}, "samples_per_second must be finite and > 0"),
    ],
)
def test_bad_scenarios(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_scenario(table, "s")


def test_bad_files_name_themselves(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no scenario 'lognorml': did you mean 'lognormal'"):
        load_scenario("lognorml")
    with pytest.raises(ValueError, match=r"none\.toml: .*No such file"):
        load_scenario(str(tmp_path / "none.toml"))
    (tmp_path / "torn.toml").write_text("steps = [")
    with pytest.raises(ValueError, match=r"torn\.toml: .*: write key = value, and texts in"):
        load_scenario(str(tmp_path / "torn.toml"))


def test_ring_and_asynchrony_do_not_go_together() -> None:
    scenario = Scenario("s", steps=10, communication=RingAllReduce(1e6, 1e8))
    arena = experiment_of(scenario)
    assert [r.row.sync for r in run_experiments([arena], chosen_runs(["bsp"], ["last"]))] == ["bsp"]
    with pytest.raises(ValueError, match="ends when its last worker has arrived"):
        list(run_experiments([arena], chosen_runs(["bsp"], ["last"], syncs=["asp"])))


def test_policies_that_need_common_steps_are_left_out_or_refused() -> None:
    everything = chosen_runs(None, ["last"], syncs=["bsp", "asp"])
    assert [run.policy for run in everything if run.sync == "asp"] == [
        "bsp", "fixed", "proportional", "lbbsp", "lbbsp-every",
    ]  # fmt: skip
    assert len(everything) == 7 + 5
    with pytest.raises(ValueError, match="policy dbs and sync asp cannot be combined: the policy"):
        chosen_runs(["dbs"], ["last"], syncs=["asp"])
    with pytest.raises(ValueError, match="no sync is named: choose from bsp, ssp"):
        chosen_runs(["bsp"], ["last"], syncs=[])


# Recorded runs


def record_run(folder: Path, *, steps: int = 60, sizes: tuple[int, ...] = (8, 8, 8)) -> float:
    """Writes the record of a plain BSP run; returns its median wall seconds per step."""
    random = np.random.default_rng(0)
    lines, walls = [], []
    for step in range(steps):
        slow = np.exp(random.normal(0, 0.2, 3)) * (1.0, 1.5, 3.0)
        busy = 0.01 * np.array(sizes) * slow
        first = step % 20 == 0
        wall = float(busy.max() + random.uniform(0.004, 0.008) + 2.0 * first)
        excluded, short = (0, 1, 2) if first else (), step == 59
        lines.append(line(step, sizes, busy + first, wall, excluded=excluded, short=short))
        if not first and step != 59:
            walls.append(wall)
    save(folder, Run(header(3, 24), lines))
    return float(np.median(walls))


def test_a_recorded_run_is_reproduced_within_a_tenth_and_lbbsp_gains(tmp_path: Path) -> None:
    measured = record_run(tmp_path)
    run_of = cluster_from_run(tmp_path)
    assert run_of.step_seconds == pytest.approx(measured)
    assert run_of.cluster.steps == 60 - 3 - 1
    assert run_of.cluster.global_batch_size == 24
    assert run_of.cluster.notes == ("steps left out because they were excluded or short: 4",)
    result = run("--from-run", tmp_path, "--policies", "bsp,lbbsp", "--predictors", "last",
                 "--json", tmp_path / "out.json")  # fmt: skip
    assert result.exit_code == 0, result.output
    bsp, lbbsp = rows_of(tmp_path / "out.json")
    assert bsp["total_seconds"] / 56 == pytest.approx(measured, rel=0.1)
    assert bsp["trace"] == tmp_path.name
    assert lbbsp["total_seconds"] < 0.8 * bsp["total_seconds"]
    assert "s per step as recorded" in result.output


# The command


@pytest.mark.slow
def test_command_with_everything(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    (tmp_path / "mine.toml").write_text(FILE)
    result = run(
        "--scenario", tmp_path / "mine.toml", "--workers", "4,8",
        "--sync", "bsp,ssp:2,elasticbsp:4",
        "--policies", "bsp,lbbsp",
        "--json", tmp_path / "out.json", "--plots", tmp_path / "plots",
        "--plot", tmp_path / "e.html",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in ("mine: 4 workers", "mine: 8 workers", "ssp:2", "ema0.5"):
        assert text in result.output
    rows = rows_of(tmp_path / "out.json")
    assert len(rows) == 2 * 3 * 2
    assert set(rows[0]) == {
        "scenario", "sync", "policy", "predictor", "workers", "total_seconds", "waiting_share",
        "efficiency", "notices",
    }  # fmt: skip
    assert {row["workers"] for row in rows} == {4, 8}
    drawn = (tmp_path / "plots" / "simulation.html").read_text()
    for title in ("Scaling", "Total time: mine", "Updates: mine"):
        assert f"<h2>{title}" in drawn


def test_command_takes_options_over_the_scenarios_own(tmp_path: Path) -> None:
    def total(*options: Any) -> Any:
        result = run("--scenario", "lognormal", "--policies", "bsp", "--json", tmp_path / "o.json",
                     "--steps", "20", *options)  # fmt: skip
        assert result.exit_code == 0, result.output
        return rows_of(tmp_path / "o.json")[0]["total_seconds"]

    plain = total()
    assert total("--seed", "0") == plain != total("--seed", "1")
    assert total("--global-batch-size", "512") == pytest.approx(2 * plain)
    assert total("--communication", "0.5") == pytest.approx(plain + 10)
    assert total("--first-use-seconds", "0.5") == pytest.approx(plain + 0.5)


def test_command_says_that_balance_does_not_pay() -> None:
    result = run("--scenario", "omnilearn-1", "--workers", "100", "--steps", "40")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert text.count("lbbsp ema0.5: from step 11 on, batches are even") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scenario", "spott"], "no scenario 'spott': did you mean 'spot'"),
        (["--scenario", "spot", "--policies", "dbs"], "use bsp, fixed or lbbsp, or leave out"),
        (["--scenario", "markov", "--workers", "1"], "--workers must be whole numbers >= 2"),
        (["--scenario", "markov", "--workers", "x"], "--workers must be whole numbers >= 2"),
        (["--scenario", "markov", "--global-batch-size", "3"], "at least workers * minimum = 4"),
        (["--scenario", "markov", "--policies", "nowhere_at_all:Mine"], "no module of that name"),
        ([], "name a trace file"),
        (["--from-run", "/nowhere"], "has no run record"),
        (["--from-run", "/nowhere", "--workers", "4"], "cannot be combined with --from-run"),
    ],
)  # fmt: skip
def test_command_ends_with_2_and_the_cure(options: list[str], message: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_trace_with_fewer_workers_than_asked_for(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.csv", trace_of([6.0] * 8, [3.0] * 8, [2.0] * 8))
    few = run(tmp_path / "t.csv", "--workers", "4", "--policies", "bsp")
    assert few.exit_code == 2
    assert "4 workers are requested, but the trace has 3: lower workers" in few.output
    two = run(tmp_path / "t.csv", "--workers", "2", "--policies", "bsp", "--json", tmp_path / "o")
    assert two.exit_code == 0
    assert rows_of(tmp_path / "o")[0]["total_seconds"] == 8 * 2.0
