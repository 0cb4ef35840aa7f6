"""Synthetic clusters: distributions by their moments, curves by hand, communication by formula."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import Affine, Profile, Proportional, Saturating, allocate
from lbbsp_core.cost import AffineArray, slowest
from lbbsp_core.sim import (
    Change,
    Constant,
    Disturbance,
    FixedTime,
    Lognormal,
    Markov,
    ParameterServer,
    Pareto,
    Preemption,
    RingAllReduce,
    ServerLinks,
    SimulatedCluster,
    SyntheticCluster,
    cores,
    synthetic_cluster,
)
from lbbsp_core.sim.slowdowns import Noise, Slowdowns
from lbbsp_core.sim.synthetic import OMNILEARN

NOISES = [Constant(), Lognormal(0.4, 0.5), Pareto(2.5), Markov(), Disturbance(steps_per_epoch=7)]
MIXED = [
    Affine(0.2, 0.1), Saturating(2.0, 0.3, 0.1), Proportional(9.0), Profile([4, 8], [1.0, 1.5])
]  # fmt: skip


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: type(noise).__name__)
@pytest.mark.parametrize("curves", [cores([1, 2, 3], 5.0, 0.3), MIXED], ids=["lines", "mixed"])
def test_arrays_and_single_curves_are_the_same_bits(noise: Noise, curves: Any) -> None:
    cluster = synthetic_cluster(curves, 40, noise=noise, seed=2)
    assert isinstance(cluster, SimulatedCluster)
    assert (cluster.steps, cluster.workers) == (40, len(curves))
    sizes = np.array([1, 7, 30, 9][: len(curves)])
    for step in range(40):
        single = [float(cluster.cost(rank, step)(x)) for rank, x in enumerate(sizes.tolist())]
        assert cluster.seconds(step, sizes).tolist() == single
        several = cluster.costs(step)
        assert [float(cost(x)) for cost, x in zip(several, sizes.tolist(), strict=True)] == single
    assert cluster.drivers(0, 3) == ()


def test_slowness_stretches_the_curve_and_a_delay_is_added() -> None:
    slowdowns = Slowdowns(np.array([[2.0, 1.0]]), np.array([[0.5, 0.0]]))
    cluster = SyntheticCluster([Affine(1.0, 0.25)] * 2, slowdowns)
    assert cluster.cost(0, 0)(4) == 2 * (1.0 + 4 * 0.25) + 0.5
    assert cluster.seconds(0, np.array([4, 4])).tolist() == [4.5, 2.0]
    with pytest.raises(ValueError, match="curves must be one for each of the 2 workers, got 1"):
        SyntheticCluster([Affine(1.0, 0.25)], slowdowns)


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: type(noise).__name__)
def test_the_seed_is_the_cluster(noise: Noise) -> None:
    def drawn(seed: int) -> list[list[float]]:
        cluster = synthetic_cluster(cores([1] * 9), 60, noise=noise, seed=seed)
        return [cluster.seconds(step, np.full(9, 8)).tolist() for step in range(60)]

    assert drawn(1) == drawn(1)
    assert (drawn(1) == drawn(2)) == isinstance(noise, Constant)


def test_lognormal_slowness_has_mean_1_and_the_memory_asked_for() -> None:
    slow = Lognormal(0.5, 0.8).draw(np.random.default_rng(0), 4000, 50).slowness
    logs = np.log(slow)
    assert slow.mean() == pytest.approx(1.0, abs=0.02)
    assert logs.std() == pytest.approx(0.5, abs=0.01)
    assert np.corrcoef(logs[1:].ravel(), logs[:-1].ravel())[0, 1] == pytest.approx(0.8, abs=0.01)


def test_pareto_tail() -> None:
    slow = Pareto(2.0).draw(np.random.default_rng(0), 1000, 100).slowness
    assert slow.min() >= 1
    assert [(slow > s).mean() for s in (2, 4)] == pytest.approx([1 / 4, 1 / 16], rel=0.05)


def test_markov_changes_as_often_as_asked_for_from_the_first_step() -> None:
    slow = Markov(3.0, 0.1, 0.3).draw(np.random.default_rng(0), 1000, 200).slowness == 3.0
    assert slow.mean() == pytest.approx(0.25, abs=0.01)
    assert slow[0].mean() == pytest.approx(0.25, abs=0.1)
    assert slow[1:][~slow[:-1]].mean() == pytest.approx(0.1, abs=0.005)
    assert (~slow[1:])[slow[:-1]].mean() == pytest.approx(0.3, abs=0.01)


def test_the_disturbance_of_dbs_lasts_and_costs_what_the_paper_says() -> None:
    slowdowns = Disturbance(steps_per_epoch=2).draw(np.random.default_rng(0), 2000, 100)
    assert isinstance(slowdowns.delay_seconds, np.ndarray)
    epochs = slowdowns.delay_seconds.reshape(1000, 2, 100)
    assert (epochs[:, 0] == epochs[:, 1]).all()
    lost = epochs.sum(axis=1)
    assert ((lost == 0) | ((lost >= 5) & (lost <= 10))).all()
    spells = [n for own in lost.T for n in _spells(own)]
    assert (min(spells), max(spells)) == (4, 20)
    healthy = lost[:-1] == 0
    assert (lost[1:][healthy] > 0).mean() == pytest.approx(0.1, abs=0.01)
    assert (slowdowns.slowness == 1).all()


def _spells(own: Any) -> list[int]:
    """Returns the lengths of runs of equal losses > 0, without the last run."""
    lengths, count = [], 0
    for before, now in pairwise(own):
        count += before > 0
        if before > 0 and now != before:
            lengths.append(count)
            count = 0
    return lengths


def test_cores_by_hand() -> None:
    assert [curve(12) for curve in cores([1, 2, 3], 4.0, 0.5)] == pytest.approx([3.5, 2.0, 1.5])
    half = cores([1, 4], 1.0, serial_share=0.5)
    assert [curve(8) for curve in half] == [8.0, 5.0]
    for layout in OMNILEARN:
        assert sum(map(int, layout.split("/"))) == 48


def test_spot_instances_leave_and_come_back_in_the_order_of_time() -> None:
    changes = list(islice(Preemption(100.0, 25.0, seed=3).changes(20), 20_000))
    times = [change.time for change in changes]
    assert times == sorted(times)
    for worker in range(20):
        own = [change for change in changes if change.worker == worker]
        assert [change.joins for change in own] == [bool(k % 2) for k in range(len(own))]
    down = [
        b.time - a.time
        for worker in range(20)
        for a, b in pairwise(c for c in changes if c.worker == worker)
        if not a.joins
    ]  # fmt: skip
    assert np.mean(down) == pytest.approx(25.0, rel=0.05)
    gone = list(Preemption(100.0, float("inf")).changes(5))
    assert [change.joins for change in gone] == [False] * 5
    assert isinstance(gone[0], Change)


def test_communication_by_formula() -> None:
    ring = RingAllReduce(bytes=8e6, bytes_per_second=1e6, latency_seconds=0.25)
    assert [ring.together(n) for n in (1, 2, 4)] == [0.0, 8.5, 13.5]  # 2 (N-1) (8 / N + .25)
    server = ParameterServer(bytes=8e6, bytes_per_second=1e6, latency_seconds=0.25, servers=2)
    assert server.together(4) == server.alone() == ServerLinks(4.0, 8.0, 0.25)
    assert FixedTime(0.5).together(9) == FixedTime(0.5).alone() == 0.5
    with pytest.raises(ValueError, match="no worker can push alone: use"):
        ring.alone()


@given(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0.01, 9)), min_size=1, max_size=9),
    st.integers(0, 50),
)
def test_lines_are_allocated_as_the_affine_curves_they_stand_for(pairs: Any, more: int) -> None:
    lines = AffineArray(*np.array(pairs).T)
    curves = [Affine(*pair) for pair in pairs]
    assert list(lines) == curves
    total = len(pairs) + more
    sizes = allocate(lines, total=total)
    assert sizes.tolist() == allocate(curves, total=total).tolist()
    assert slowest(lines, sizes.tolist()) == slowest(curves, sizes.tolist())


def test_lines_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="seconds_per_sample must be finite and > 0, got nan"):
        allocate(AffineArray(np.zeros(2), np.array([1.0, np.nan])), total=4)
    with pytest.raises(ValueError, match="the cost of worker 1 must be finite"):
        allocate(AffineArray(np.array([0.0, 1e250]), np.ones(2)), total=4)
    with pytest.raises(ValueError, match="costs must have one curve per worker"):
        allocate(AffineArray(np.zeros(0), np.zeros(0)), total=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lognormal(-1.0), "Lognormal.sigma must be finite and >= 0, got -1.0"),
        (lambda: Lognormal(1.0, 1.0), r"Lognormal.memory must be in \[0, 1\), got 1.0"),
        (lambda: Pareto(1.0), "Pareto.alpha - 1 must be finite and > 0"),
        (lambda: Markov(0.0), "Markov.slow must be finite and > 0"),
        (lambda: Markov(3.0, 0.0), r"Markov.to_slow must be in \(0, 1\], got 0.0"),
        (lambda: Disturbance(2.0), r"Disturbance.probability must be in \(0, 1\], got 2.0"),
        (lambda: Disturbance(epochs=(5, 4)), r"epochs must be \[minimum, maximum\].*got \(5, 4\)"),
        (lambda: Disturbance(steps_per_epoch=0), "steps_per_epoch must be an integer >= 1, got 0"),
        (lambda: cores([0]), "cores must be finite and > 0, got 0"),
        (lambda: cores([1], serial_share=1.0), r"serial_share must be in \[0, 1\), got 1.0"),
        (lambda: synthetic_cluster([], 3), "needs workers and steps, got 0 and 3"),
        (lambda: Preemption(0.0, 1.0), "mean_up_seconds must be finite and > 0"),
        (lambda: Preemption(1.0, 0.0), "mean_down_seconds must be > 0, got 0.0"),
        (lambda: FixedTime(-1.0), "communication_seconds must be finite and >= 0, got -1.0"),
        (lambda: RingAllReduce(1.0, 0.0), "RingAllReduce.bytes_per_second must be finite and > 0"),
        (lambda: ParameterServer(1.0, 1.0, servers=0), "servers must be an integer >= 1"),
    ],
)
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
