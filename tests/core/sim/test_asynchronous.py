"""Asynchronous runs: by hand, against closed forms, and against synchronous runs."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import numpy as np
import pytest

from lbbsp_core import (
    ASP,
    BSP,
    DSSP,
    SSP,
    Affine,
    ElasticBSP,
    Ema,
    EpochBalanced,
    Even,
    FixedShares,
    LastValue,
    LeaderStraggler,
    Limits,
    LoadBalanced,
    Policy,
    ProportionalControl,
    Saturating,
    Synchroniser,
)
from lbbsp_core.sim import (
    Change,
    Lognormal,
    Markov,
    ParameterServer,
    Preemption,
    SimConfig,
    cores,
    run_async,
    run_bsp,
    schedule,
    synthetic_cluster,
)

UNEQUAL = cores([1, 1, 2, 4], 8.0)
NOISE = Lognormal(0.4, 0.7)


def test_asynchronous_workers_share_the_samples_by_their_speed() -> None:
    """1 + 3 samples per second do 96 in 24 s; batches of 4 are pushed every 4 s and 4/3 s."""
    cluster = synthetic_cluster(cores([1, 3], 1.0), 12)
    run = run_async(cluster, SimConfig(8), ASP())
    assert run.total_seconds == pytest.approx(24.0)
    assert np.bincount(run.schedule.worker).tolist() == [6, 18]
    assert set(run.sizes.tolist()) == {4}
    assert run.waiting_share == 0.0


def test_a_push_and_pull_is_paid_by_each() -> None:
    cluster = synthetic_cluster(cores([1, 3], 1.0), 12)
    run = run_async(cluster, SimConfig(8, communication_seconds=4.0), SSP(math.inf))
    first = run.schedule.push[run.schedule.iteration == 0]
    assert first.tolist() == [4.0 + 4.0, 4 / 3 + 4.0]


@pytest.mark.parametrize(
    "communication",
    [
        {"communication_seconds": 0.25},
        {"links": ParameterServer(2.0, 4.0, 0.01, servers=2).alone()},
    ],
    ids=lambda option: next(iter(option)),
)
@pytest.mark.parametrize(
    "policy", [Even(), FixedShares((1, 1, 2, 4)), LoadBalanced(), ProportionalControl()]
)
def test_bsp_on_events_is_bsp_in_step(policy: Any, communication: dict[str, Any]) -> None:
    cluster = synthetic_cluster(UNEQUAL, 80, noise=NOISE)
    config = SimConfig(97, **communication)
    events = run_async(cluster, config, BSP(), policy, Ema(0.5))
    in_step = run_bsp(cluster, config, policy, Ema(0.5))
    assert events.total_seconds == pytest.approx(in_step.total_seconds, rel=1e-9)
    assert events.sizes.reshape(4, 80).T.tolist() == in_step.sizes.tolist()
    assert events.schedule.updates == 80
    assert events.waiting_share == pytest.approx(in_step.waiting_share)
    assert events.waiting_share > 0


@pytest.mark.parametrize(
    ("sync", "pushes"), [(SSP(0), 1), (SSP(2), 5), (DSSP(1, 4), 9), (ElasticBSP(4), 4)], ids=repr
)
def test_staleness_is_bounded_as_derived(sync: Synchroniser, pushes: int) -> None:
    """Another worker pushes at most so often while one computes an iteration (docs/theory.md)."""
    most = 0
    for seed in range(12):
        speeds = np.random.default_rng(seed).integers(1, 9, 2).tolist()
        noise = Markov(slow=20.0, to_slow=0.2, to_fast=0.3)
        cluster = synthetic_cluster(cores(speeds, 4.0), 60, noise=noise, seed=seed)
        run = run_async(cluster, SimConfig(16), sync).schedule
        others = run.worker[:, None] != run.worker
        meanwhile = (run.push > run.start[:, None]) & (run.push < run.push[:, None])
        most = max(most, int((others & meanwhile).sum(axis=1).max()))
    assert most == pushes, "attained, and not exceeded"


@pytest.mark.parametrize("policy", [LoadBalanced(), ProportionalControl()])
def test_balanced_batches_end_the_wait_of_ssp(policy: Policy) -> None:
    """LB + SSP, and LB + ASP: after some rounds of even batches, all workers take equally long."""
    cluster = synthetic_cluster(UNEQUAL, 60)
    even = run_async(cluster, SimConfig(64), SSP(3))
    for sync in (SSP(3), ASP(), DSSP(1, 4)):
        balanced = run_async(cluster, SimConfig(64), sync, policy, LastValue())
        last = [balanced.sizes[balanced.schedule.worker == w][-1] for w in range(4)]
        assert last == [8, 8, 16, 32]
        assert balanced.waiting_share < 0.1
    assert even.waiting_share > 0.3


@pytest.mark.parametrize("cost", [Affine(2.0, 1.0), [Saturating(20.0, 0.0, 1.0)] * 4])
def test_it_assumes_what_balancers_assume(cost: Any) -> None:
    cluster = synthetic_cluster([Saturating(2.0, 0.0, 0.1)] * 3 + [Affine(0.1, 0.05)], 30)
    config = SimConfig(80, cost=cost)
    events = run_async(cluster, config, BSP(), LoadBalanced(), LastValue())
    in_step = run_bsp(cluster, config, LoadBalanced(), LastValue())
    assert events.total_seconds == pytest.approx(in_step.total_seconds, rel=1e-6)


def test_slowdowns_repeat_where_a_fast_worker_does_more_iterations_than_were_drawn() -> None:
    cluster = synthetic_cluster(cores([1, 9], 1.0), 10, noise=Lognormal(0.3))
    run = run_async(cluster, SimConfig(8), ASP()).schedule
    fast = (run.push - run.start)[run.worker == 1]
    assert len(fast) > 10
    assert fast[10] == pytest.approx(fast[0])


# Spot instances


def test_who_is_preempted_loses_an_iteration_and_the_rest_goes_on() -> None:
    cluster = synthetic_cluster(cores([1, 1, 1], 16.0), 200)
    spot = Preemption(40.0, 10.0, seed=1)
    for sync in (BSP(), SSP(3), ASP(), DSSP(1, 4), ElasticBSP(4)):
        run = run_async(cluster, SimConfig(48), sync, preemption=spot)
        done = run.sizes[run.schedule.update >= 0].sum()
        assert 200 * 48 <= done < 200 * 48 + 48
        assert 1.1 < run.total_seconds / 200 < 2.5
    again = run_async(cluster, SimConfig(48), ElasticBSP(4), preemption=spot)
    assert again.total_seconds == run.total_seconds


@pytest.mark.parametrize("first_use_seconds", [0.0, 0.05])
def test_balanced_batches_are_those_of_the_workers_that_are_present(first_use_seconds) -> None:
    cluster, spot = synthetic_cluster(cores([2, 2, 1, 1], 16.0), 300), Preemption(60, 20, seed=2)
    config = SimConfig(96, first_use_seconds=first_use_seconds)
    run = run_async(cluster, config, BSP(), LoadBalanced(), preemption=spot)
    entered = run.schedule.update >= 0
    totals = np.bincount(run.schedule.update[entered], weights=run.sizes[entered])
    workers = np.bincount(run.schedule.update[entered])
    assert np.mean(totals == 96) > 0.85, "but for steps in which a worker left or returned"
    assert len(set(workers[totals == 96])) > 2
    even = run_async(cluster, config, BSP(), Even(), preemption=spot)
    assert run.total_seconds < 0.8 * even.total_seconds


def test_too_few_workers_for_a_step_say_so() -> None:
    cluster = synthetic_cluster(cores([1, 1], 16.0), 200)
    config, spot = SimConfig(48, limits=Limits(1, 32)), Preemption(20.0, 20.0)
    with pytest.raises(ValueError, match=r"48.*32|32.*48"):
        run_async(cluster, config, BSP(), LoadBalanced(), preemption=spot)


def test_many_changes_are_no_reason_to_give_up_while_updates_come() -> None:
    cluster = synthetic_cluster(cores([1, 1], 16.0), 500)
    run = run_async(cluster, SimConfig(32), ASP(), preemption=Preemption(2.0, 0.5))
    assert run.total_seconds / 2.5 * 2 * 2 > 100 * 2, (
        "more changes than MAX_IDLE_CHANGES allows in a row"
    )


def test_a_scenario_that_can_never_finish_says_so() -> None:
    cluster = synthetic_cluster(cores([1, 1], 16.0), 200)
    with pytest.raises(ValueError, match=r"never finish: all workers have left with \d+ of 6400"):
        run_async(cluster, SimConfig(32), ASP(), preemption=Preemption(20.0, math.inf))
    with pytest.raises(ValueError, match="never finish: workers leave before they have done"):
        run_async(cluster, SimConfig(32), BSP(), preemption=Preemption(1e-4, 1e-4))


def test_combinations_that_cannot_be_say_why() -> None:
    cluster = synthetic_cluster(cores([1, 1]), 5)
    for refused in EpochBalanced(), LeaderStraggler():
        message = f"{type(refused).__name__} and this synchroniser cannot be combined"
        with pytest.raises(ValueError, match=message):
            run_async(cluster, SimConfig(16), ASP(), refused)
    with pytest.raises(ValueError, match="ProportionalControl plans for all workers, and with"):
        run_async(
            cluster, SimConfig(16), ASP(), ProportionalControl(), preemption=Preemption(1.0, 1.0)
        )


def test_progress_comes_to_the_steps_asked_for() -> None:
    steps: list[int] = []
    run_async(synthetic_cluster(UNEQUAL, 40), SimConfig(64), ASP(), progress=steps.append)
    assert sum(steps) == 40
    assert min(steps) >= 1


# Ends and changes of a run


def test_a_run_may_end_when_enough_has_entered() -> None:
    entered: list[tuple[int, float]] = []

    def on_update(worker: int, now: float) -> bool:
        entered.append((worker, now))
        return len(entered) >= 5

    run = schedule(SSP(1), lambda worker, _: 1.0 + 3 * worker, workers=2, on_update=on_update)
    assert entered == [(0, 1.0), (0, 2.0), (1, 4.0), (0, 5.0), (1, 8.0)]
    assert run.total_seconds == entered[-1][1]
    assert (run.update >= 0).all()
    assert run.release.max() == entered[-1][1], "waiting workers are released at the end"


def test_a_list_of_changes_is_sorted_and_an_endless_one_is_read_as_time_goes_on() -> None:
    out_of_order = [Change(2.5, 0, joins=True), Change(1.5, 0)]
    run = schedule(ASP(), lambda *_: 1.0, workers=1, iterations=3, changes=out_of_order)
    assert run.start.tolist() == [0.0, 2.5, 3.5]
    endless = (Change(1.5 + k, 0, joins=bool(k % 2)) for k in count())
    run = schedule(
        ASP(), lambda *_: 0.5, workers=1, changes=endless, on_update=lambda _, now: now >= 3.5
    )
    assert run.push.tolist() == [0.5, 1.0, 1.5, 3.0, 3.5]
