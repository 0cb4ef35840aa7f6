"""The reserve of a step: each sample once however claims interleave, and what hindsight chooses."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import Ema, LoadBalanced
from lbbsp_core.reserve import (
    FRACTIONS,
    Claims,
    Hindsight,
    HindsightState,
    Pace,
    PartCosts,
    Seen,
    estimate,
    replay,
    split,
)
from lbbsp_core.reserve.pace import together_seconds
from lbbsp_core.sim import SimConfig, read_trace, replay_trace
from lbbsp_core.sim.engine import run_bsp, run_oracle

TRACES = Path(__file__).parents[2] / "traces"

SIZES = st.lists(st.integers(0, 200), min_size=1, max_size=6).filter(any)
PERCENTS = st.sampled_from(FRACTIONS)
GRAINS = st.sampled_from([1, 4, 32])


@given(SIZES, PERCENTS, GRAINS)
def test_main_parts_and_the_reserve_sum_to_the_plan(sizes, percent, grain):
    mains, reserve = split(sizes, percent, grain)
    assert sum(mains) + reserve == sum(sizes)
    for size, main in zip(sizes, mains, strict=True):
        assert min(size, 1) <= main <= size
        assert main == size or main % grain == 0
        assert main < size * (100 - percent) / 100 + grain


@given(SIZES, PERCENTS, GRAINS, st.data())
def test_each_sample_is_computed_once_in_any_interleaving(sizes, percent, grain, data):
    mains, reserve = split(sizes, percent, grain)
    workers = [rank for rank, size in enumerate(sizes) if size]
    claims = {rank: Claims(sizes, mains, rank, 1.0, 0.001, 0.5, grain) for rank in workers}
    counter, computed, now = 0, [], 0.0
    asked: dict[int, tuple[int, int]] = {}  # answers that are on their way
    while workers:
        rank = data.draw(st.sampled_from(workers))
        now += data.draw(st.floats(0, 0.5))
        if rank in asked:
            begin, end = claims[rank].take(*asked.pop(rank), now)
            computed += range(begin, end)
            if begin == end or claims[rank].is_empty:
                workers.remove(rank)
        else:
            size = claims[rank].next_size(now)
            assert size >= 1
            assert size % grain == 0
            asked[rank] = counter, size
            counter += size
    assert sorted(computed) == list(range(reserve))
    assert sum(own.samples for own in claims.values()) == reserve


PACES = st.lists(
    st.builds(Pace, st.floats(1e-4, 0.1), st.floats(0, 20), st.floats(0, 20)),
    min_size=2,
    max_size=5,
)


@given(PACES, PERCENTS, st.floats(0, 0.01), st.data())
def test_a_replay_computes_all_samples(paces, percent, claim_seconds, data):
    sizes = data.draw(st.lists(st.integers(1, 100), min_size=len(paces), max_size=len(paces)))
    shared = replay(sizes, percent, paces, claim_seconds)
    assert sum(shared.samples) == sum(sizes)
    for rank, pace in enumerate(paces):
        done = pace.main(shared.samples[rank]) + shared.parts[rank] * pace.part(0)
        least = done + shared.parts[rank] * claim_seconds
        # The last claim of a worker may find nothing.
        assert least - 1e-9 <= shared.seconds[rank] <= least + claim_seconds + 1e-9
    assert max(shared.seconds) >= together_seconds(sizes, paces) - max(
        pace.seconds_per_sample for pace in paces
    )


def test_without_a_reserve_a_replay_is_the_plan():
    paces = [Pace(0.01, 3, 2), Pace(0.02, 1, 2)]
    shared = replay((10, 20), 0, paces, 0.001)
    assert shared == ((pytest.approx(0.13), pytest.approx(0.42)), (10, 20), (0, 0))
    assert estimate((10, 20), 0, paces, 0.001) == max(shared.seconds)


def test_free_claims_of_single_samples_leave_nobody_waiting():
    paces = [Pace(0.01), Pace(0.03), Pace(0.05)]
    shared = replay((100, 100, 100), 80, paces)
    assert max(shared.seconds) - together_seconds((100, 100, 100), paces) < 0.05


def noisy(steps, seed=0, slow=3.0):
    """Paces of three workers, one of which is slow in each step."""
    rng = np.random.default_rng(seed)
    for victim in rng.integers(0, 3, steps):
        yield [Pace(0.002 * (slow if rank == victim else 1.0)) for rank in range(3)]


def test_it_is_used_where_it_pays_and_not_where_parts_cost_more():
    def chosen(part_overhead, claim_seconds=0.001, slow=3.0):
        state = HindsightState()
        for paces in noisy(40, slow=slow):
            known = [pace._replace(part_overhead=part_overhead) for pace in paces]
            state = Hindsight().update(state, (64, 64, 64), known, claim_seconds)
        return state.percent

    assert chosen(0.3) >= 20
    assert chosen(200.0) == 0  # samples: three batches
    assert chosen(0.3, claim_seconds=0.2) == 0
    assert chosen(0.3, slow=1.0) == 0  # equal workers


def test_it_begins_only_for_a_gain_that_is_worth_a_compilation():
    def chosen(percent, gain):
        costs = (1.0, *[1 - gain] * (len(FRACTIONS) - 1))
        known = HindsightState(percent, costs, steps=30, step_seconds=0.128)
        return Hindsight().update(known, (64, 64, 64), [Pace(0.002)] * 3, 0.0).percent

    assert [chosen(0, gain) > 0 for gain in (0.03, 0.015)] == [True, False]
    assert [chosen(20, gain) > 0 for gain in (0.015, 0.003)] == [True, False]


def test_a_reserve_that_turns_out_to_lose_is_off_within_ten_steps():
    hindsight, state = Hindsight(), HindsightState()
    for paces in noisy(60):
        state = hindsight.update(state, (64, 64, 64), paces, 0.001)
    assert state.percent
    # What nobody measures makes steps take longer than their replay.
    slow = state
    for paces in noisy(10, seed=1):
        if slow.percent:
            expected = max(replay((64, 64, 64), slow.percent, paces, 0.001).seconds)
            seen = Seen(slow.percent, 3 * expected)
            slow = hindsight.update(slow, (64, 64, 64), paces, 0.001, seen=seen)
    assert not slow.percent
    # The same once the overhead of parts is measured.
    costly = state
    for paces in noisy(10, seed=2):
        known = [pace._replace(part_overhead=200.0) for pace in paces]
        costly = hindsight.update(costly, (64, 64, 64), known, 0.001)
    assert not costly.percent


def test_many_workers_are_estimated():
    paces = [Pace(0.002 * (3 if rank % 10 else 1)) for rank in range(100)]
    sizes = (64,) * 100
    by_estimate = Hindsight().update(HindsightState(), sizes, paces, 0.001).costs
    by_replay = Hindsight(max_replayed=100).update(HindsightState(), sizes, paces, 0.001).costs
    assert by_estimate != by_replay
    assert by_estimate == pytest.approx(by_replay, rel=0.05)


def test_the_overhead_of_parts_is_found_though_contention_begins_within_steps():
    rng, found = np.random.default_rng(0), {1.0: PartCosts(), 6.0: PartCosts()}
    for step in range(60):
        slowness = 5 if step % 4 == 0 else 1  # after the main part
        for samples in rng.integers(3, 20, 6).tolist():
            for overhead, costs in found.items():
                seconds = 0.003 * slowness * (samples + overhead)
                found[overhead] = costs.after(samples, seconds, 0.003)
    for overhead, costs in found.items():  # a straight fit: 7.5 and 17.5
        assert costs.overhead(0.003) == pytest.approx(overhead, abs=1.5)


CHOSEN = {("contention_bursty", 0.004), ("job_coarse", 0.063)}


@pytest.mark.parametrize(
    ("name", "part_overhead"),
    [
        pytest.param(*case, marks=[] if case in CHOSEN else [pytest.mark.campaign])
        for case in product(["contention_bursty", "job_coarse", "pai_job_2"], [0.004, 0.063])
    ],
)
def test_on_recorded_contention_it_is_never_worse(name, part_overhead):
    cluster = replay_trace(read_trace(TRACES / f"{name}.csv"))
    config = SimConfig(cluster.global_batch_size, part_overhead=part_overhead)
    best = run_oracle(cluster, config).total_seconds
    alone, shared = (
        best / run_bsp(cluster, config, LoadBalanced(), Ema(0.5), shares_work=shares).total_seconds
        for shares in (False, True)
    )
    assert shared >= alone - 0.002
    if (name, part_overhead) == ("contention_bursty", 0.004):
        assert shared >= 0.93
