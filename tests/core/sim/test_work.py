"""Samples of different work in virtual time: cuts by count and by work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lbbsp_core.sim import Scenario, load_scenario
from lbbsp_core.sim.config import LognormalWork, SimulatedSamples
from lbbsp_core.sim.experiment import chosen_runs, experiment_of, run_experiments
from lbbsp_core.sim.scenario import read_scenario

RUNS = chosen_runs(["bsp", "lbbsp"], ["ema0.5"])


def efficiencies(scenario: Scenario) -> dict[str, list[float]]:
    """Efficiency of each run, by the name of the scenario."""
    found: dict[str, list[float]] = {}
    experiments = (experiment_of(kind) for kind in scenario.kinds())
    for result in run_experiments(experiments, RUNS):
        found.setdefault(result.row.name, []).append(result.row.efficiency)
    return found


def test_equal_workers_wait_less_for_steps_that_are_cut_by_work() -> None:
    """Published for 8 workers and sigma 1, without the number of samples: .661 and .890."""
    found = efficiencies(replace(load_scenario("lengths").sized(8), steps=150))
    plain, balanced = found["lengths by count"]
    assert plain == pytest.approx(0.66, abs=0.015)
    assert balanced < plain, "lengths are mistaken for speeds"
    assert found["lengths by work"] == pytest.approx([0.889, 0.889], abs=0.015)


def test_unequal_workers_are_balanced_by_work() -> None:
    scenario = Scenario("s", speeds=(1.0, 1.0, 0.4), steps=100, work=LognormalWork(1.0))
    found = efficiencies(scenario)
    assert found["s by work"][1] > 0.95 > 0.88 > found["s by count"][1] > found["s by count"][0]


def test_equal_samples_are_cut_as_without_work() -> None:
    scenario = Scenario("s", speeds=(1.0, 0.5), steps=60)
    ((plain, balanced),) = efficiencies(scenario).values()
    for kind in efficiencies(replace(scenario, work=LognormalWork(0.0))).values():
        assert kind == pytest.approx([plain, balanced], rel=1e-12)


def test_work_is_that_of_the_samples_which_a_worker_draws() -> None:
    samples = SimulatedSamples(16, 5, LognormalWork(1.0, known=False, seed=4))
    values = np.exp(np.random.default_rng(4).standard_normal(80))
    mean = values.mean()
    for step in (0, 7):
        order = samples.order.indices(step)
        found = samples.amounts(step, np.array([10, 6])).tolist()
        expected = [values[order[:10]].sum() / mean, values[order[10:]].sum() / mean]
        np.testing.assert_allclose(found, expected, atol=16 / 1024)
        assert samples.mean_amount(step) == pytest.approx(sum(found) / 16)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "lognorml"}, "did you mean 'lognormal'"),
        ({"kind": "lognormal", "sigma": -1.0}, r"work\.sigma must be finite and >= 0, got -1"),
        ({"kind": "lognormal", "known": "yes"}, r"work\.known must be true or false, got 'yes'"),
        ({"kind": "lognormal", "seed": 0.5}, r"work\.seed must be an integer >= 0, got 0\.5"),
        ({"sigma": 1.0}, "work must have a kind: one of lognormal"),
    ],
)
def test_wrong_options_are_named(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_scenario({"work": table}, "s")


def test_a_chosen_kind_keeps_the_name() -> None:
    table = {"work": {"kind": "lognormal", "known": True}}
    assert [kind.name for kind in read_scenario(table, "s").kinds()] == ["s"]


def test_workers_without_common_steps_are_refused() -> None:
    experiment = experiment_of(read_scenario({"work": {"kind": "lognormal"}, "steps": 10}, "s"))
    with pytest.raises(ValueError, match=r"need common steps.*got sync asp.*leave \[work\] out"):
        list(run_experiments([experiment], chosen_runs(["bsp"], ["last"], syncs=["asp"])))
