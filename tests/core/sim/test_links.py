"""Queues at the servers' links: by hand, closed forms, and both kinds of run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import ASP, BSP, DSSP, SSP, ElasticBSP, Even, Synchroniser
from lbbsp_core.sim import (
    Change,
    FixedTime,
    Lognormal,
    ParameterServer,
    Preemption,
    Scenario,
    ServerLinks,
    SimConfig,
    Timeline,
    cores,
    run_async,
    run_bsp,
    run_oracle,
    schedule,
    synthetic_cluster,
)
from lbbsp_core.sim.communication import LinkQueue
from lbbsp_core.sim.experiment import chosen_runs, experiment_of, run_experiments

SYNCS = (BSP(), SSP(2), ASP(), DSSP(1, 4), ElasticBSP(4))
UNEQUAL = cores([1, 1, 2, 4], 8.0)
NOISE = Lognormal(0.4, 0.7)
GIGABYTE = 1e9


def test_one_worker_is_charged_the_closed_form() -> None:
    server = ParameterServer(8e6, 1e6, 0.25, servers=2)
    cluster = synthetic_cluster(cores([2], 1.0), 10, noise=NOISE)
    busy = run_bsp(cluster, SimConfig(8), Even()).total_seconds
    expected = busy + 10 * 2 * (8.0 + 0.25)
    config = SimConfig(8, links=server.alone())
    assert run_bsp(cluster, config, Even()).total_seconds == pytest.approx(expected)
    assert run_oracle(cluster, config).links == config.links
    for sync in SYNCS:
        assert run_async(cluster, config, sync).total_seconds == pytest.approx(expected)


@given(st.integers(1, 40), st.integers(1, 9), st.floats(0.0, 9.0))
def test_simultaneous_transfers_take_the_closed_form(
    workers: int, servers: int, latency: float
) -> None:
    """All push at once: the queue gives the closed form."""
    queue = LinkQueue(ParameterServer(3.0, 2.0, latency, servers).alone())
    last = max(queue.transfer(0.0) for _ in range(workers))
    assert last == pytest.approx(max(1.0, workers / servers) * 3.0 / 2.0 + latency)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 99))
def test_arrays_queue_as_the_event_loop_does(workers: int, servers: int, seed: int) -> None:
    """Every push of a synchronous run arrives at the same time in both engines."""
    rng = np.random.default_rng(seed)
    busy = rng.integers(1, 9, (5, workers)) / 2.0  # many ties
    links = ParameterServer(rng.uniform(0.1, 3.0), 1.0, rng.uniform(0.0, 0.5), servers).alone()
    pushes = links.push_seconds(busy)
    barriers = np.concatenate([[0.0], np.cumsum(pushes.max(axis=1))])
    run = schedule(BSP(), busy.T, links=links)
    in_step = (pushes + barriers[:-1, None]).T.ravel()
    assert run.push == pytest.approx(in_step, rel=1e-9)
    assert run.total_seconds == pytest.approx(barriers[-1], rel=1e-9)


@pytest.mark.parametrize("sync", SYNCS)
def test_infinitely_fast_links_change_nothing(sync: Synchroniser) -> None:
    cluster = synthetic_cluster(UNEQUAL, 40, noise=NOISE)
    fast = run_async(cluster, SimConfig(64, links=ServerLinks(0.0, 0.0)), sync)
    plain = run_async(cluster, SimConfig(64), sync)
    for ours, theirs in zip(fast.schedule, plain.schedule, strict=True):
        assert ours.tolist() == theirs.tolist()
    in_step = SimConfig(64, links=ServerLinks(0.0, 0.0))
    walls = run_bsp(cluster, in_step, Even()).wall_seconds
    assert walls.tolist() == run_bsp(cluster, SimConfig(64), Even()).wall_seconds.tolist()


def test_a_queue_by_hand() -> None:
    """Pulls end at 1 and 2; worker 0 computes to 4, worker 1 to 3: its push is first, to 4."""
    run = schedule(BSP(), [[3.0], [1.0]], links=ServerLinks(1.0, 1.0))
    assert run.push.tolist() == [5.0, 4.0]
    assert run.waiting_seconds == 1.0


def test_pushes_end_where_they_arrive() -> None:
    links = ServerLinks(1.0, 1.0)
    run = Timeline(np.ones((2, 2), np.int64), np.array([[3.0, 1.0]] * 2), links=links)
    assert run.push_seconds.tolist() == [[5.0, 4.0]] * 2
    assert run.waiting_share == 2.0 / (2 * 10.0)


def test_a_push_in_the_queue_is_lost_with_its_worker_and_delays_the_others() -> None:
    run = schedule(
        ASP(), [[1.0], [1.5]], links=ServerLinks(1.0, 1.0), changes=[Change(2.5, 0)]
    )  # worker 0 pulls to 1, computes to 2, pushes until 3; worker 1 pulls to 2
    assert (run.worker.tolist(), run.push.tolist()) == ([1], [4.5])
    cluster = synthetic_cluster(UNEQUAL, 40, noise=NOISE)
    config = SimConfig(64, links=ServerLinks(0.2, 0.2))
    for sync in SYNCS:
        spot = run_async(cluster, config, sync, preemption=Preemption(60.0, 10.0, seed=2))
        assert math.isfinite(spot.total_seconds)


def test_a_scenario_queues_under_every_synchroniser() -> None:
    """Equal workers at a slow link: ASP is bound by the link, BSP by link and computation."""
    slow = ParameterServer(2.0, 1.0)
    scenario = Scenario("s", workers=4, steps=50, communication=slow)
    experiment = experiment_of(scenario)
    assert experiment.together.links == experiment.alone.links == slow.alone()
    assert experiment.together.communication_seconds == 0.0
    runs = chosen_runs(["bsp"], ["last"], syncs=["bsp", "asp", "ssp:3"])
    bsp, asp, ssp = [r.row.total_seconds for r in run_experiments([experiment], runs)]
    assert bsp == pytest.approx(50 * (1.0 + 5 * 2.0))  # the first pull, then four pushes
    assert asp == pytest.approx(50 * 4 * 2.0 + 2.0 + 1.0)  # 200 pushes after the first pull
    assert ssp == pytest.approx(asp)
    plain = Scenario("s", workers=4, steps=50, communication=FixedTime(0.5))
    assert experiment_of(plain).alone.links is None


def test_options() -> None:
    with pytest.raises(ValueError, match=r"communication_seconds must be 0 with links, got 1.0"):
        SimConfig(8, communication_seconds=1.0, links=ServerLinks(1.0, 1.0))
    with pytest.raises(ValueError, match=r"ServerLinks.shard_seconds must be finite and >= 0"):
        ServerLinks(-1.0, 1.0)
