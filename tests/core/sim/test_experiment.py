"""`simulate`: virtual time by hand, the oracle by brute force, the command."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("typer")
pytest.importorskip("rich")

from made_traces import trace_of
from tables import simulate
from typer.testing import CliRunner

from lbbsp_core import (
    ASP,
    BSP,
    SSP,
    Affine,
    Balancer,
    CostShape,
    Ema,
    Even,
    GlobalOrder,
    LastValue,
    Limits,
    LoadBalanced,
    Measurement,
    Profile,
    Saturating,
)
from lbbsp_core.cli.app import application
from lbbsp_core.installation import extra
from lbbsp_core.registry import POLICIES
from lbbsp_core.sim import (
    ReplayedCluster,
    Series,
    SimConfig,
    SimulatedCluster,
    TraceError,
    replay_trace,
    run_bsp,
    run_oracle,
    write_trace,
)
from lbbsp_core.sim.experiment import build_policy, chosen_runs, figures, profiled_shares
from lbbsp_core.sim.slowdowns import Slowdowns
from lbbsp_core.sim.synthetic import SyntheticCluster
from lbbsp_core.testing import exchange_in_process

SPEEDS = ([4, 4, 4, 2, 2], [2, 2, 2, 4, 4])
"""Two workers; at a global batch of 12 the oracle needs 2 s a step, equal batches 3 s."""


def cluster_of(*speeds: Sequence[float]) -> ReplayedCluster:
    return replay_trace(trace_of(*speeds))


# By hand


@pytest.mark.parametrize(
    ("policy", "walls"),
    [
        ("bsp", [3, 3, 3, 3, 3]),
        ("fixed", [2, 2, 2, 4, 4]),  # 8 and 4, by the first step
        ("dbs", [3, 3, 3, 4, 4]),  # 8 4 after an epoch of three
        ("proportional", [3, 3, 3, 4, 4]),  # 8 4 after three steps
        ("leader-straggler", [3, 3, 3, 3, 3.5]),  # 7 5 after a window of four
        ("lbbsp", [3, 2, 2, 4, 2]),
        ("lbbsp-every", [3, 2, 2, 4, 2]),
    ],
)
def test_two_workers_by_hand(policy: str, walls: list[float]) -> None:
    (row,) = simulate(
        [trace_of(*SPEEDS)], policies=[policy], predictors=["last"], steps_per_epoch=3
    )
    assert row.total_seconds == sum(walls)
    assert row.efficiency == 10 / sum(walls)
    assert (row.kind, row.name, row.workers) == ("trace", "made.csv", 2)
    assert (row.sync, row.policy) == ("bsp", policy)
    assert row.predictor == ("last" if policy.startswith("lbbsp") else None)


def test_a_share_of_waiting_by_hand() -> None:
    """Steps of 3, 2, 2, 4, 2 s, in which the faster one waits 1.5, 0, 0, 3, 0 s."""
    line = run_bsp(cluster_of(*SPEEDS), SimConfig(12), LoadBalanced(), LastValue())
    assert line.sizes.tolist() == [[6, 6], [8, 4], [8, 4], [8, 4], [4, 8]]
    assert line.wall_seconds.tolist() == [3, 2, 2, 4, 2]
    assert line.waiting_share == 4.5 / (2 * 13)


def test_a_lag_keeps_older_plans_in_force() -> None:
    (row,) = simulate([trace_of(*SPEEDS)], policies=["lbbsp"], predictors=["last"], lag=2)
    assert row.total_seconds == 3 + 3 + 2 + 4 + 4


def test_communication_is_paid_by_all_and_is_no_waiting() -> None:
    (row,) = simulate(
        [trace_of(*SPEEDS)], policies=["lbbsp"], predictors=["last"], communication_seconds=0.5
    )
    assert row.total_seconds == 13 + 5 * 0.5
    assert row.efficiency == 12.5 / 15.5
    assert row.waiting_share == 4.5 / (2 * 15.5)


def test_the_global_batch_is_the_recordings_unless_given() -> None:
    assert cluster_of(*SPEEDS).global_batch_size == 12
    (row,) = simulate([trace_of(*SPEEDS)], policies=["bsp"], global_batch_size=24)
    assert row.total_seconds == 30


def test_recorded_batches_count_for_speeds_only() -> None:
    """Speeds alone are taken from a trace: other batches at the same speeds change nothing."""
    trace = trace_of(*SPEEDS)
    odd = replace(trace.series[0], measurements=tuple(
        Measurement(2 * m.samples, 2 * m.busy_seconds, m.drivers)
        for m in trace.series[0].measurements
    ))  # fmt: skip
    doubled = replace(trace, series=(odd, trace.series[1]))
    assert replay_trace(doubled).global_batch_size == 18
    assert simulate([doubled], policies=["bsp"], global_batch_size=12) == simulate(
        [trace], policies=["bsp"]
    )


# Bounds


NOISY = st.lists(
    st.lists(st.integers(1, 60).map(float), min_size=6, max_size=6), min_size=2, max_size=3
)


@settings(max_examples=20)
@given(NOISY, st.integers(3, 12))
def test_the_oracle_is_the_best_of_all_splits(speeds: list[list[float]], total: int) -> None:
    cluster = cluster_of(*speeds)
    walls = run_oracle(cluster, SimConfig(total)).wall_seconds
    for step, wall in enumerate(walls):
        v = [own[step] for own in speeds]
        best = min(
            max(x / speed for x, speed in zip(split, v, strict=True))
            for split in splits(total, len(v))
        )
        assert wall == pytest.approx(best, rel=1e-12)


def splits(total: int, workers: int) -> list[list[int]]:
    if workers == 1:
        return [[total]]
    return [
        [x, *rest] for x in range(1, total - workers + 2) for rest in splits(total - x, workers - 1)
    ]


@settings(max_examples=10)
@given(NOISY)
def test_bsp_takes_the_sum_of_maxima_and_nobody_beats_the_oracle(speeds: list[list[float]]) -> None:
    total = 12
    rows = simulate([trace_of(*speeds)], predictors=["last"], global_batch_size=total)
    maxima = np.max([total / len(speeds) / np.array(own) for own in speeds], axis=0)
    assert rows[0].policy == "bsp"
    assert rows[0].total_seconds == pytest.approx(maxima.sum(), rel=1e-12)
    assert all(0 < row.efficiency <= 1 + 1e-12 for row in rows)
    assert all(0 <= row.waiting_share < 1 for row in rows)


def test_on_a_steady_cluster_the_right_shares_are_the_oracle() -> None:
    (row,) = simulate([trace_of([30.0] * 9, [10.0] * 9, samples=20)], policies=["fixed"])
    assert row.efficiency == 1
    assert row.waiting_share == 0


def test_limits_bind_the_oracle_too() -> None:
    config = SimConfig(12, limits=Limits(1, 7))
    assert run_oracle(cluster_of(*SPEEDS), config).sizes.tolist() == [[7, 5]] * 3 + [[5, 7]] * 2


# The same loop as in training


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_plans_are_those_of_balancers_that_exchange_messages(name: str, lag: int) -> None:
    random = np.random.default_rng(5)
    speeds = 50 * np.exp(random.normal(0, 0.5, (3, 60)))
    cluster = replay_trace(trace_of(*speeds.tolist()))
    policy = build_policy(name, cluster)
    line = run_bsp(cluster, SimConfig(99, lag, steps_per_epoch=7), policy, LastValue())

    balancers = [
        Balancer(
            rank=rank, workers=3, global_batch_size=99, policy=policy, predictor=LastValue(),
            lag=lag,
        )
        for rank in range(3)
    ]  # fmt: skip
    for balancer in balancers:
        balancer.schedule.use_order(GlobalOrder(7 * 99, 99))
    for step in range(60):
        sizes = balancers[step % 3].sizes(step)
        assert line.sizes[step].tolist() == list(sizes)
        exchange_in_process(balancers, [x / v for x, v in zip(sizes, speeds[:, step], strict=True)])


class Seen(NamedTuple):
    learned: tuple[float, ...]


@dataclass(frozen=True)
class Spy:
    """Notes the drivers it learns with, and those it forecasts with."""

    asked: list[Any]

    def init(self) -> Seen:
        return Seen(())

    def update(self, state: Seen, measurement: Measurement) -> Seen:
        return Seen((*state.learned, *measurement.drivers))

    def predict(self, state: Seen, drivers: tuple[float, ...] = (), horizon: int = 1) -> float:
        self.asked.append((state.learned, drivers, horizon))
        return 1.0


def test_predictors_know_the_drivers_of_the_next_step_and_learn_with_the_steps_own() -> None:
    spy = Spy([])
    run_bsp(cluster_of([1.0] * 5, [1.0] * 5), SimConfig(12, lag=2), LoadBalanced(), spy)
    second = spy.asked[1::2]
    told = [drivers for _, drivers, _ in second]
    assert told == [(101.0,), (102.0,), (103.0,), (104.0,), (104.0,)]
    assert second[-1][0] == (101.0, 101.0, 102.0, 103.0, 104.0)  # the first has no own ones
    assert {horizon for *_, horizon in second} == {2}


# Traces and names


def test_steps_are_aligned_by_number() -> None:
    trace = trace_of([1, 2, 3, 4, 5, 6], [10, 20, 30, 40, 50, 60])
    late = Series(1, np.arange(6) + 1, trace.series[1].measurements)
    cluster = replay_trace(replace(trace, series=(trace.series[0], late)))
    assert isinstance(cluster, SimulatedCluster)
    assert (cluster.steps, cluster.workers) == (5, 2)
    assert cluster.speeds.tolist() == [[2, 10], [3, 20], [4, 30], [5, 40], [6, 50]]
    assert cluster.drivers(1, 0) == (100.0,)
    assert cluster.notes == ("steps left out because not every worker has them: 2",)
    assert cluster_of(*SPEEDS).notes == ()


def test_a_trace_of_one_worker_or_without_common_steps_names_the_cure() -> None:
    with pytest.raises(TraceError, match=r"made.csv: a single worker \(number 0\) .* at least two"):
        cluster_of([1.0] * 9)
    with pytest.raises(TraceError, match=r"made.csv: the 2 workers have only 4 of 4 steps"):
        cluster_of([1.0] * 4, [1.0] * 4)


def test_the_shares_of_fixed_are_the_speeds_of_the_first_fifth() -> None:
    """10 steps: the first two. 1 + 1 sample in 1 + 1/3 s are 1.5 a second."""
    shares = profiled_shares(cluster_of([1, 3, *[9] * 8], [2, 2, *[7] * 8]))
    assert shares == pytest.approx((1.5, 2.0))


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="no policy 'lbsp': did you mean 'lbbsp'"):
        chosen_runs(["bsp", "lbsp"], ["last"])
    with pytest.raises(ValueError, match=r"no predictor 'ema0\.4': did you mean 'ema0\.\d'"):
        chosen_runs(["lbbsp"], ["ema0.4"])
    with pytest.raises(ValueError, match="no policy is named: choose from bsp"):
        chosen_runs([], ["last"])


def test_without_statsmodels_arima_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape(f"pip install {extra('arima')}")):
        chosen_runs(["lbbsp"], ["arima"])


def test_predictors_are_trained_for_the_lag_and_named_once() -> None:
    runs = chosen_runs(["lbbsp", "bsp", "lbbsp"], ["mixture", "mixture"], lag=3)
    assert [run.title for run in runs] == ["lbbsp mixture", "bsp"]
    assert runs[0].predictor.horizon == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be an integer >= 1, got 0"),
        ({"lag": 0}, "lag must be an integer >= 1"),
        ({"lag": 10**20}, "lag must be at most 1000, got 1000"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be an integer >= 1"),
        ({"communication_seconds": -1.0}, "communication_seconds must be finite and >= 0, got -1"),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimConfig(**{"global_batch_size": 8, **options})


def test_progress_is_told_of_every_step() -> None:
    told: list[tuple[str, str, int]] = []
    simulate(
        [trace_of(*SPEEDS)], policies=["bsp", "lbbsp"], predictors=["last"],
        progress=lambda *what: told.append(what),
    )  # fmt: skip
    assert told == [("made.csv", "bsp", 1)] * 5 + [("made.csv", "lbbsp last", 1)] * 5


def test_only_policies_that_use_costs_are_combined_with_predictors() -> None:
    for run in chosen_runs(None, ["last", "ema0.5"]):
        assert POLICIES[run.policy].cls.uses_costs == (run.predictor is not None)


def test_policies_may_have_options() -> None:
    """A change from 3 s to 2 s gains a third: not enough for 0.4."""
    rows = simulate([trace_of(*SPEEDS)], policies=["lbbsp:min_gain=0.4"], predictors=["last"])
    assert [(row.policy, row.total_seconds) for row in rows] == [("lbbsp:min_gain=0.4", 15)]
    with pytest.raises(ValueError, match=r"min_gain must be in \[0, 1\), got 2"):
        chosen_runs(["lbbsp:min_gain=2"], ["last"])


def test_sharing_work_helps_where_noise_is_and_parts_are_cheap(tmp_path: Path) -> None:
    def rows(*words: object) -> dict[str, float]:
        file = tmp_path / "rows.json"
        command = [
            *("--scenario", "pareto", "--workers", 4, "--steps", 50, "--json", file),
            *("--policies", "lbbsp,lbbsp+reserve", *words),
        ]
        done = run(*command)
        assert done.exit_code == 0, done.output
        return {row["policy"]: row["efficiency"] for row in json.loads(file.read_text())["rows"]}

    cheap = rows("--part-overhead", 0.004)
    assert cheap["lbbsp+reserve"] > cheap["lbbsp"] + 0.1
    dear = rows("--part-overhead", 10)
    assert dear["lbbsp+reserve"] == dear["lbbsp"]
    slow = rows("--claim-seconds", 100)
    assert slow["lbbsp+reserve"] == slow["lbbsp"]


def test_work_is_shared_where_a_further_sample_costs_nothing() -> None:
    curves = [Affine(0.01, 0.05), Profile([8, 16, 32], [0.05, 0.05, 0.09])]
    cluster = SyntheticCluster(curves, Slowdowns(np.ones((5, 2))))
    shared = run_bsp(cluster, SimConfig(32, cost=curves), Even(), shares_work=True)
    assert shared.total_seconds > 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["constant", "--sync", "asp"], "lbbsp+reserve shares work inside common steps"),
        (["spot"], "lbbsp+reserve shares work inside common steps of workers that stay"),
        (["lengths"], "work sharing needs samples of equal work"),
        (["constant", "--first-use-seconds", 1], "and free first uses of batch sizes"),
        (["constant", "--part-overhead", -1], "part_overhead must be finite and >= 0, got -1"),
        (["constant", "--claim-seconds", "nan"], "claim_seconds must be finite and >= 0, got nan"),
    ],
)
def test_what_cannot_share_work_is_named(words: Sequence[object], problem: str) -> None:
    done = run("--scenario", *words, "--policies", "lbbsp+reserve")
    assert done.exit_code == 2
    assert problem in " ".join(done.output.split())


def test_objects_give_the_rows_of_their_names() -> None:
    def rows(policies: Any, predictors: Any, syncs: Any) -> list[Any]:
        return simulate(
            [trace_of(*SPEEDS)], policies=policies, predictors=predictors, syncs=syncs
        )  # fmt: skip

    named = rows(["bsp", "lbbsp", "fixed"], ["last", "ema0.5"], ["bsp", "ssp:2", "asp"])
    objects = rows(
        [Even(), LoadBalanced(), "fixed"], [LastValue(), Ema(0.5)], [BSP(), SSP(2), ASP()]
    )
    assert len(named) == 12
    for row, other in zip(named, objects, strict=True):
        assert other == replace(row, sync=other.sync)
    assert [row.sync for row in objects] == ["bsp"] * 4 + ["SSP(staleness=2)"] * 4 + ["asp"] * 4
    (own,) = simulate([trace_of(*SPEEDS)], policies=[LoadBalanced(0.4)], predictors=["last"])
    assert (own.policy, own.total_seconds) == ("LoadBalanced(min_gain=0.4, interval=1)", 15)


@pytest.mark.parametrize(
    ("policies", "problem"),
    [
        ("lbbsp", r"give a list of policy names, got 'lbbsp': write \['lbbsp'\]"),
        ([LoadBalanced], r"got the class LoadBalanced: create an object, as in policy=LoadB"),
        ([LastValue()], r"got LastValue\(\), which lacks .*is_static, .*: choose from bsp, fixed"),
    ],
)
def test_wrong_policies_are_answered_with_what_to_write(policies: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        chosen_runs(policies, ["last"])


def test_limits_and_costs_may_be_given_as_in_training() -> None:
    config = SimConfig(12, limits=7, cost="affine:0.1:0.2")
    assert config.cost == Affine(0.1, 0.2)
    cluster = cluster_of(*SPEEDS)
    assert run_bsp(cluster, config, LoadBalanced(), LastValue()).sizes.max() == 7


def test_the_costs_that_balancers_assume_may_be_given() -> None:
    """With 6 samples of overhead, 6 in 1.5 s and in 3 s are 8 and 4 a second."""
    cluster = cluster_of([4.0] * 5, [2.0] * 5)
    config = SimConfig(12, cost=CostShape(Affine(6.0, 1.0), max_overhead=6.0))
    known = run_bsp(cluster, SimConfig(12), LoadBalanced(min_gain=0.0), LastValue())
    fixed = run_bsp(cluster, config, LoadBalanced(min_gain=0.0), LastValue())
    assert known.sizes[1].tolist() == [8, 4]
    assert fixed.sizes[1].tolist() == [10, 2]  # (10 + 6) / 8 = (2 + 6) / 4


def test_simulated_balancers_know_the_curves_of_their_peers() -> None:
    """A piecewise cost can be planned for once all workers have exchanged their static info."""
    config = SimConfig(12, cost=Saturating(8.0, 0.0, 1.0))
    line = run_bsp(cluster_of([4.0] * 5, [2.0] * 5), config, LoadBalanced(), LastValue())
    assert line.sizes.shape == (5, 2)
    assert (line.sizes.sum(axis=1) == 12).all()


# The command


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(application(), ["simulate", *map(str, arguments)])


def write(path: Path, *speeds: Sequence[float]) -> Path:
    write_trace(path, trace_of(*speeds))
    return path


def test_command_prints_and_writes_figures_and_a_picture(tmp_path: Path) -> None:
    files = [write(tmp_path / name, *SPEEDS) for name in ("a[b].csv", "c.csv")]
    result = run(
        "--trace", *files, "--policies", "bsp, lbbsp", "--predictors", "last,ema0.5",
        "--json", tmp_path / "out.json", "--plot", tmp_path / "out.html",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in ("a[b].csv: 2 workers", "c.csv", "lbbsp", "ema0.5", "13.00 s", "17.3%", "0.7692"):
        assert text in result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(written) == {"rows"}
    assert written["rows"][1] == {
        "trace": "a[b].csv", "sync": "bsp", "policy": "lbbsp", "predictor": "last", "workers": 2,
        "total_seconds": 13.0, "waiting_share": 4.5 / 26, "efficiency": 10 / 13,
        "notices": [],
    }  # fmt: skip
    assert len(written["rows"]) == 6
    assert "<h2>a[b].csv, 2 workers</h2>" in (tmp_path / "out.html").read_text()


def test_command_runs_every_policy_but_that_which_observes_by_default(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", *SPEEDS)
    result = run(path, "--predictors", "last", "--json", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert result.exit_code == 0
    assert [row["policy"] for row in rows] == [name for name in POLICIES if name != "observe"]
    assert rows == figures(simulate([trace_of(*SPEEDS, name="t.csv")], predictors=["last"]))["rows"]


def test_command_notes_what_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [*SPEEDS[0], 3], SPEEDS[1])
    result = run("--trace", path, "--policies", "bsp")
    assert result.exit_code == 0
    assert "left out because not every worker has them: 1" in result.output
