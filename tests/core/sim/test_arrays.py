"""Workers in arrays: plans and times equal those of real balancers bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from lbbsp_core import (
    Affine,
    CostShape,
    Ema,
    EpochBalanced,
    Even,
    LastValue,
    LeaderStraggler,
    Limits,
    LoadBalanced,
    Measurement,
    Narx,
    ProportionalControl,
    Saturating,
)
from lbbsp_core.sim import (
    Disturbance,
    Lognormal,
    Markov,
    Pareto,
    SimConfig,
    Timeline,
    cores,
    engine,
    run_bsp,
    run_oracle,
    synthetic_cluster,
)
from lbbsp_core.sim.arrays import fits_arrays

CONFIGS: list[dict[str, Any]] = [
    {},
    {"lag": 3},
    {"cost": Affine(3.0, 1.0)},
    {"cost": CostShape(Affine(3.0, 2.0), max_overhead=9.0), "communication_seconds": 0.5},
    {"limits": Limits(2, 70), "granularity": 4},
]
NOISES = {
    "lognormal": Lognormal(0.5),
    "pareto": Pareto(1.1),  # far outliers, which the filter rejects
    "markov": Markov(9.0, 0.1, 0.3),  # new levels beyond the filter's factor
    "dbs": Disturbance(0.3, (1, 3), (1, 3), 10),  # delays, which bend the shape
}


@pytest.mark.parametrize(
    ("noise", "config"),
    [
        pytest.param(
            *(noise, config),
            id=f"{noise}-{','.join(config) or 'plain'}",
            marks=[pytest.mark.campaign] if config and noise != "dbs" else [],
        )
        for noise in NOISES
        for config in CONFIGS
    ],
)
def test_plans_and_times_are_those_of_real_balancers(noise: str, config: dict[str, Any]) -> None:
    for curves in (cores([3, 1, 2], 5.0), cores([2, 5, 1, 1], 7.0, 0.8)):
        cluster = synthetic_cluster(curves, 40, noise=NOISES[noise], seed=4)
        sim_config = SimConfig(120, steps_per_epoch=9, **config)
        _check_same(cluster, sim_config, LoadBalanced(), LastValue())
        _check_same(cluster, sim_config, LoadBalanced(min_gain=0.0, interval=3), Ema(0.3))


@pytest.mark.parametrize(
    "policy", [Even(), EpochBalanced(), ProportionalControl(), LeaderStraggler()]
)
@pytest.mark.parametrize("noise", ["pareto", "dbs"])
def test_policies_that_measure_only(noise: str, policy: Any) -> None:
    cluster = synthetic_cluster(cores([2, 5, 1, 1], 7.0, 0.8), 80, noise=NOISES[noise], seed=1)
    _check_same(cluster, SimConfig(120, lag=2, steps_per_epoch=9), policy, LastValue())


def run_balancers(*args: Any) -> Timeline:
    """Runs real balancers, also where arrays would do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "fits_arrays", lambda *_: False)
        return run_bsp(*args)


def _check_same(cluster: Any, config: SimConfig, policy: Any, predictor: Any) -> None:
    assert fits_arrays(config, policy, predictor)
    fast = run_bsp(cluster, config, policy, predictor)
    real = run_balancers(cluster, config, policy, predictor)
    assert fast.sizes.tolist() == real.sizes.tolist()
    assert fast.busy_seconds.tolist() == real.busy_seconds.tolist()
    assert fast.total_seconds == real.total_seconds


class Fixed(NamedTuple):
    speed: Any


class Slower:
    """Predictor defined outside the package: half of the last speed."""

    elementwise = True

    def init(self) -> Fixed:
        return Fixed(np.nan)

    def update(self, state: Fixed, measurement: Measurement) -> Fixed:
        return Fixed(0.5 * measurement.samples_per_second)

    def predict(self, state: Fixed, drivers: tuple[float, ...] = (), horizon: int = 1) -> Any:
        return state.speed


def test_any_predictor_that_declares_itself_elementwise_runs_in_arrays() -> None:
    cluster = synthetic_cluster(cores([2, 5, 1, 1], 7.0, 0.8), 40, noise=NOISES["markov"], seed=1)
    config = SimConfig(120)
    assert fits_arrays(config, LoadBalanced(), Slower())
    _check_same(cluster, config, LoadBalanced(), Slower())


class Spy(LoadBalanced):
    """Records all observations that the policy is given."""

    def update(self, state: Any, cluster: Any, observation: Any) -> Any:
        curves = [None if cost is None else cost.segments() for cost in observation.costs]
        OBSERVATIONS.append(replace(observation, costs=tuple(curves)))
        return super().update(state, cluster, observation)


OBSERVATIONS: list[Any] = []


def test_the_policy_is_given_the_same_integers() -> None:
    cluster = synthetic_cluster(cores([2, 5, 1, 1], 7.0, 0.8), 30, noise=NOISES["markov"], seed=1)
    observed = []
    for run in (run_bsp, run_balancers):
        OBSERVATIONS.clear()
        run(cluster, SimConfig(120, lag=2, steps_per_epoch=9), Spy(), Ema(0.3))
        observed.append([o for k, o in enumerate(OBSERVATIONS) if o not in OBSERVATIONS[:k]])
    assert observed[0] == observed[1]
    assert len(observed[0]) == 30


def test_what_fits_into_arrays() -> None:
    several = SimConfig(12, cost=[Affine(0.1, 0.1)] * 2)
    assert fits_arrays(SimConfig(12, cost=Saturating(1.0, 0.0, 1.0)), Even(), Narx())
    for config, predictor in (
        (SimConfig(12), Narx()),
        (SimConfig(12, cost=Saturating(1.0, 0.0, 1.0)), LastValue()),
        (several, LastValue()),
    ):
        assert not fits_arrays(config, LoadBalanced(), predictor)


def test_each_balancer_may_assume_a_curve_of_its_own() -> None:
    """Profiled shapes and constant speeds: the plan is the oracle's after one step."""
    curves = [Saturating(2.0, 0.5, 0.25), Affine(1.0, 0.125)]
    cluster = synthetic_cluster(curves, 4)
    config = SimConfig(24, cost=curves)
    line = run_bsp(cluster, config, LoadBalanced(min_gain=0.0), LastValue())
    assert line.sizes[1:].tolist() == run_oracle(cluster, config).sizes[1:].tolist()


def test_a_thousand_workers_reach_the_balance_of_a_steady_cluster() -> None:
    cluster = synthetic_cluster(cores([1, 2, 3, 6] * 250, 10.0), 6)
    config = SimConfig(64_000)
    line = run_bsp(cluster, config, LoadBalanced(), LastValue())
    best = run_oracle(cluster, config)
    assert line.wall_seconds[1:].tolist() == best.wall_seconds[1:].tolist()
    assert (line.sizes.sum(axis=1) == 64_000).all()


@pytest.mark.parametrize("limits", [Limits(0, 9), [Limits()] * 3])
def test_options_that_balancers_refuse_are_refused(limits: Any) -> None:
    with pytest.raises(ValueError, match=r"minimum must be >= 1|limits must be one for each"):
        run_bsp(synthetic_cluster(cores([1, 2]), 5), SimConfig(12, limits=limits), Even())
