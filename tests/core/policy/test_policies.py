"""The contract of all policies, then the behaviour of Even, FixedShares and LoadBalanced."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from teams import team

from lbbsp_core import (
    BatchConstraints,
    Even,
    FixedShares,
    LastValue,
    LeaderStraggler,
    Limits,
    LoadBalanced,
    Measurement,
    Observation,
    Policy,
    Profile,
    Proportional,
    ProportionalControl,
    registry,
)
from lbbsp_core.cost import slowest
from lbbsp_core.policy import Notices, load_balanced
from lbbsp_core.policy.load_balanced import LoadBalancedState
from lbbsp_core.sim.cluster import ReplayedCluster
from lbbsp_core.sim.config import SimConfig
from lbbsp_core.sim.engine import Timeline, run_bsp
from lbbsp_core.testing import ChangingPlans, check_plan, check_policy, exchange_in_process

POLICIES: list[Policy] = [
    *(component.build() for component in registry.POLICIES.values() if not component.missing),
    LoadBalanced(min_gain=0.3, interval=4),
    ProportionalControl(dead_band=0.0, interval=1, drop=0.01),
    LeaderStraggler(delta=3, window=1),
    LeaderStraggler(delta=1000, window=1, longest=2),
    ChangingPlans(),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_contract(policy: Policy) -> None:
    assert isinstance(policy, Policy)
    check_policy(policy)


@pytest.mark.parametrize(
    "policy", [FixedShares((4.0, 1.0, 2.0)), ProportionalControl(ratings=(4.0, 1.0, 2.0))]
)
def test_contract_of_rated_workers(policy: Policy) -> None:
    check_policy(
        policy,
        BatchConstraints(70, (Limits(),) * 3),
        BatchConstraints(70, (Limits(1, 30), Limits(12), Limits())),
        BatchConstraints(70, (Limits(),) * 3, granularity=8),
    )


def three(global_batch_size: int = 120, **options: Any) -> BatchConstraints:
    return BatchConstraints(global_batch_size, (Limits(),) * 3, **options)


def seen(speeds: Sequence[float | None], step: int = 0) -> Observation:
    """Returns a step in which each worker predicts its speed, or has no estimate."""
    costs = tuple(None if speed is None else Proportional(speed) for speed in speeds)
    unknown = tuple(rank for rank, cost in enumerate(costs) if cost is None)
    return Observation(step, (40, 40, 40), (1.0,) * len(speeds), unknown, costs)


# Cluster


def test_a_cluster_without_a_plan_names_value_and_cure() -> None:
    with pytest.raises(
        ValueError,
        match=r"global_batch_size must be at least workers \* minimum = 8, got 6: raise it, or lo",
    ):
        BatchConstraints(6, (Limits(4), Limits(4)))
    with pytest.raises(ValueError, match=r"sum of maxima = 80, got 100: lower"):
        LoadBalanced().init(BatchConstraints(100, (Limits(1, 40), Limits(1, 40))))
    with pytest.raises(ValueError, match="granularity"):
        LoadBalanced().init(BatchConstraints(16, (Limits(),) * 3, granularity=8))


# Even and FixedShares


@given(st.integers(1, 9), st.integers(0, 200))
def test_even_sizes_differ_by_one_at_most(workers: int, more: int) -> None:
    sizes = Even().init(BatchConstraints(workers + more, (Limits(),) * workers)).sizes
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True), "lower ranks take the remainder"


def test_even_within_limits_and_granularity() -> None:
    limited = BatchConstraints(60, (Limits(1, 10), Limits(), Limits()))
    assert Even().init(limited).sizes == (10, 25, 25)
    assert sorted(Even().init(three(64, granularity=16)).sizes) == [16, 16, 32]


def test_fixed_shares_are_proportional() -> None:
    assert FixedShares((9, 12, 18)).init(three(78)).sizes == (18, 24, 36)  # by cores
    assert FixedShares((65e12, 65e12, 130e12)).init(three(80)).sizes == (20, 20, 40)  # by flops
    assert FixedShares([1, 1, 4]) == FixedShares((1.0, 1.0, 4.0))  # type: ignore[arg-type]


def test_shares_must_be_one_for_each_worker() -> None:
    with pytest.raises(ValueError, match="one value for each of the 3 workers, got 2"):
        FixedShares((1.0, 2.0)).init(three())


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (FixedShares, {"shares": ()}, "FixedShares.shares must have one value per worker, got non"),
        (FixedShares, {"shares": (1, 0)}, r"FixedShares\.shares must be finite and > 0, got 0"),
        *(
            (LoadBalanced, {"min_gain": bad}, rf"min_gain must be in \[0, 1\), got {bad}")
            for bad in (-0.1, 1.0, math.nan)
        ),
        (LoadBalanced, {"interval": 0}, "interval must be an integer >= 1, got 0"),
        (ProportionalControl, {"ratings": ()}, "Control.ratings must have one value per worker"),
        (ProportionalControl, {"ratings": (1, 0)}, "ProportionalControl.ratings must be .*got 0"),
        (ProportionalControl, {"dead_band": 1.0}, r"dead_band must be in \[0, 1\), got 1.0"),
        (ProportionalControl, {"smoothing": 0.0}, r"smoothing must be in \(0, 1\], got 0.0"),
        (ProportionalControl, {"smoothing": math.nan}, "smoothing must be"),
        (ProportionalControl, {"drop": 1.5}, "drop must be"),
        (ProportionalControl, {"interval": 0}, "interval must be an integer >= 1, got 0"),
        (LeaderStraggler, {"delta": 0}, "delta must be an integer >= 1, got 0"),
        (LeaderStraggler, {"window": 0}, "window must be an integer >= 1, got 0"),
        (LeaderStraggler, {"window": 8, "longest": 4}, "longest must be an integer >= 8, got 4"),
    ],
)
def test_options_out_of_range(policy: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(**options)


# LoadBalanced


def decide(policy: LoadBalanced, *observations: Observation) -> list[tuple[int, ...]]:
    state, sizes = policy.init(three()), []
    for observation in observations:
        state = policy.update(state, three(), observation)
        sizes.append(state.sizes)
    return sizes


def test_load_balanced_plans_where_all_estimates_are_known() -> None:
    speeds = [None] * 3, [1.0, None, 3.0], [1.0, 2.0, 3.0], [9.0, None, 9.0]
    plans = decide(LoadBalanced(), *map(seen, speeds))
    assert plans == [(40, 40, 40), (40, 40, 40), (20, 40, 60), (20, 40, 60)]


@given(st.lists(st.floats(1.0, 100.0), min_size=3, max_size=3))
def test_the_papers_mode_takes_every_better_plan(speeds: list[float]) -> None:
    costs = [Proportional(speed) for speed in speeds]
    (sizes,) = decide(LoadBalanced(min_gain=0.0), seen(speeds))
    best = three().plan(costs)
    assert slowest(costs, sizes) == slowest(costs, best)


def test_a_change_must_gain_enough() -> None:
    """The best plan takes the slowest worker from 40 / 0.9 s to 36 / 0.9 s, 10 % less."""
    observation = seen([0.9, 1.05, 1.05])
    costs = [Proportional(0.9), Proportional(1.05), Proportional(1.05)]
    gain = 1 - slowest(costs, (36, 42, 42)) / slowest(costs, (40, 40, 40))
    assert gain == pytest.approx(0.1)
    assert decide(LoadBalanced(min_gain=0.09), observation) == [(36, 42, 42)]
    assert decide(LoadBalanced(min_gain=0.11), observation) == [(40, 40, 40)]


def test_noise_moves_nothing_by_default() -> None:
    source = random.Random(0)
    observations = [seen([source.uniform(9.85, 10.15) for _ in range(3)]) for _ in range(50)]
    assert set(decide(LoadBalanced(), *observations)) == {(40, 40, 40)}
    assert len(set(decide(LoadBalanced(min_gain=0.0), *observations))) > 1


@given(
    st.lists(st.tuples(*[st.floats(0.95, 1.05)] * 3), max_size=30),
    st.sampled_from([0.0, 0.02, 0.1]),
)
def test_no_plan_is_computed_where_none_can_gain_enough(
    speeds: list[tuple[float, ...]], min_gain: float
) -> None:
    def run() -> tuple[list[tuple[int, ...]], int]:
        with patch.object(BatchConstraints, "plan", autospec=True, side_effect=plan) as computed:
            return decide(LoadBalanced(min_gain), *map(seen, speeds)), computed.call_count

    plan = BatchConstraints.plan
    plans, computed = run()
    with patch.object(load_balanced, "least_slowest", return_value=0.0):
        assert run() == (plans, len(speeds)), "without the bound all are computed"
    assert computed <= len(speeds) * (min_gain < 0.1), "these speeds differ by a tenth"


def replayed(speeds: Sequence[Sequence[float]], policy: Policy, lag: int = 1) -> Timeline:
    """Runs a policy on workers with these speeds in each step, in samples per second."""
    cluster = ReplayedCluster(np.array(speeds), (((),) * len(speeds[0]),) * len(speeds), 120)
    return run_bsp(cluster, SimConfig(120, lag), policy, LastValue())


def test_what_cannot_be_predicted_costs_some_steps_and_is_tried_again_later() -> None:
    opposite = [(2.0, 1.0), (1.0, 2.0)] * 100  # each forecast is of the other worker's speed
    steady = [(2.0, 1.0)] * 200
    done = replayed(opposite + steady, LoadBalanced())
    even = replayed(opposite + steady, Even())
    plans = done.sizes[:, 0].tolist()
    assert set(plans[1:11]) == {40, 80}, "ten steps show what it costs"
    back = plans.index(80, 200)
    assert set(plans[11:back]) == {60}
    assert back < 280
    assert set(plans[back:]) == {80}
    lost = done.wall_seconds[:200] - even.wall_seconds[:200]
    assert lost.tolist() == [0.0] + [20.0] * 10 + [0.0] * 189
    paused, resumed = done.notices
    assert "from step 11 on, batches are even" in paused
    assert f"from step {back} on, batches are balanced again" in resumed
    without = replayed(opposite, LoadBalanced(min_gain=0))
    assert set(without.sizes[1:, 0].tolist()) == {40, 80}, "the paper's mode"


def test_each_turn_has_a_notice_also_in_words_that_were_used_before() -> None:
    notices = Notices()
    turns = [0.0, -0.01, -0.01, 0.01, -0.01]
    said = [
        notices.of(LoadBalancedState((60, 60), turn=turn), f"step {number}")
        for number, turn in enumerate(turns)
    ]
    assert [text.partition(" on, ")[0] for text in said] == ["", "from step 1", "", "from step 3",
                                                             "from step 4"]  # fmt: skip
    assert list(notices) == [text for text in said if text]


def test_balance_is_judged_by_the_plans_that_were_made_for_a_step() -> None:
    alternating = [(2.0, 1.0), (1.0, 2.0)] * 100
    right = replayed(alternating, LoadBalanced(), lag=2)  # of the step before the last one
    assert not right.notices
    assert set(right.sizes[2:, 0].tolist()) == {40, 80}
    wrong = replayed([one for one in alternating for _ in range(2)], LoadBalanced(), lag=2)
    assert len(wrong.notices) == 1
    assert set(wrong.sizes[20:, 0].tolist()) == {60}


def test_balance_that_pays_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(3).lognormal(sigma=0.2, size=(300, 2))
    speeds = (np.array([2.0, 1.0]) * noise).tolist()
    done = replayed(speeds, LoadBalanced())
    monkeypatch.setattr(load_balanced, "_FEWEST_STEPS", math.inf)
    assert (done.sizes == replayed(speeds, LoadBalanced()).sizes).all()


def test_an_interval_decides_every_so_many_steps() -> None:
    speeds = [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 1.0, 4.0], [4.0, 1.0, 1.0]]
    observations = [seen(row, step) for step, row in enumerate(speeds)]
    plans = [(40, 40, 40), (60, 40, 20), (60, 40, 20), (80, 20, 20)]
    assert decide(LoadBalanced(interval=2), *observations) == plans


def test_gpus_of_2018_finish_together_below_their_memory() -> None:
    """The paper's curves: flat until a GPU is saturated, then lines 10 + x and 30 + 2 x.

    They are equal with 60 and 20 samples; with 50 at most, 10 + 50 < 30 + 2 * 30.
    """
    costs = Profile([1, 22, 100], [32, 32, 110]), Profile([1, 5, 100], [40, 40, 230])
    observation, policy = Observation(0, (40, 40), (1.0, 1.0), (), costs), LoadBalanced(min_gain=0)

    def planned(total: int, most: int | None = None) -> tuple[int, ...]:
        constraints = BatchConstraints(total, (Limits(1, most), Limits()))
        return policy.update(policy.init(constraints), constraints, observation).sizes

    assert (planned(80), planned(80, 50)) == ((60, 20), (50, 30))
    assert slowest(costs, planned(20)) == 40.0  # no GPU is saturated: the slower floor decides


def test_who_needs_no_costs_gets_none_predicted() -> None:
    """Prediction takes time in every step."""

    class Unwanted(LastValue):
        def update(self, state: Any, measurement: Measurement) -> Any:
            raise AssertionError("no prediction is needed")

    both = team(2, 8, policy=FixedShares((3.0, 1.0)), predictor=Unwanted())
    assert {message.picoseconds_per_sample for message in exchange_in_process(both, [1, 2])} == {0}


# The contract check itself: each of these policies breaks the contract in one way.


class State(NamedTuple):
    sizes: tuple[int, ...]
    memory: list[int]


def keep(state: State, constraints: BatchConstraints, observation: Observation) -> Any:
    return state.sizes


@dataclass(frozen=True)
class Broken:
    """The even plan at first, then what a function decides; options are flags of the contract."""

    decide: Callable[[State, BatchConstraints, Observation], Any] = keep
    uses_costs: Any = True
    is_static: Any = False
    needs_common_steps: Any = False
    accepts_narrower_limits: Any = False

    def init(self, constraints: BatchConstraints) -> State:
        return State(Even().init(constraints).sizes, [])

    def update(
        self, state: State, constraints: BatchConstraints, observation: Observation
    ) -> State:
        return state._replace(sizes=self.decide(state, constraints, observation))


def lose(state: State, constraints: BatchConstraints, observation: Observation) -> Any:
    first, *rest = state.sizes
    return (first - 1, *rest)


def remember(state: State, constraints: BatchConstraints, observation: Observation) -> Any:
    state.memory.append(observation.step)
    return state.sizes


def dice(state: State, constraints: BatchConstraints, observation: Observation) -> Any:
    return constraints.plan([Proportional(random.random() + 0.1) for _ in constraints.limits])


def alternate(state: State, constraints: BatchConstraints, observation: Observation) -> Any:
    speeds = [1.0 + (observation.step + rank) % 2 for rank in range(constraints.workers)]
    return constraints.plan([Proportional(speed) for speed in speeds])


def trust_costs(state: State, constraints: BatchConstraints, observation: Observation) -> Any:
    return constraints.plan(observation.costs)  # type: ignore[arg-type]


def follow_costs(state: State, constraints: BatchConstraints, observation: Observation) -> Any:
    costs = observation.known_costs()
    return state.sizes if costs is None else constraints.plan(costs)


def best(constraints: BatchConstraints, observation: Observation) -> tuple[int, ...]:
    return constraints.plan(observation.known_costs() or [Proportional(1.0)] * constraints.workers)


def ignore_minima(state: State, constraints: BatchConstraints, observation: Observation) -> Any:
    limits = tuple(replace(each, minimum=1) for each in constraints.limits)
    return best(replace(constraints, limits=limits), observation)


def ignore_maxima(state: State, constraints: BatchConstraints, observation: Observation) -> Any:
    limits = tuple(replace(each, maximum=None) for each in constraints.limits)
    return best(replace(constraints, limits=limits), observation)


def split_eights(state: State, constraints: BatchConstraints, observation: Observation) -> Any:
    is_narrower = any(each.maximum is not None for each in constraints.limits)
    granularity = 1 if is_narrower else constraints.granularity
    return best(replace(constraints, granularity=granularity), observation)


CLUSTER_OF_EIGHTS = BatchConstraints(104, (Limits(),) * 3, granularity=8)


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (follow_costs, "must keep Limits"),  # its plan stays while it may choose
        (ignore_minima, "must keep Limits"),
        (ignore_maxima, "must keep Limits"),
        (split_eights, "must be in multiples of 8"),
    ],
)
def test_the_contract_finds_who_ignores_narrower_limits(decide: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_policy(Broken(decide, accepts_narrower_limits=True), CLUSTER_OF_EIGHTS)
    check_policy(Broken(decide), CLUSTER_OF_EIGHTS)  # is never given any


def test_narrower_limits_are_kept_between_decisions_and_without_predictions() -> None:
    policy, wide = LoadBalanced(interval=10), three()
    narrow = BatchConstraints(120, (Limits(30, 50), Limits(30, 50), Limits(30, 45)))
    state = policy.init(wide)._replace(sizes=(80, 20, 20))
    for speeds, expected in (((None,) * 3, (50, 35, 35)), ((1.0, 1.0, 4.0), (38, 37, 45))):
        observation = seen(speeds)
        assert policy.update(state, wide, observation).sizes == state.sizes
        assert policy.update(state, narrow, observation).sizes == expected


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Broken(lose), "must sum to 64"),
        (Broken(remember), "update changed the state"),
        (Broken(dice), "must decide the same"),
        (Broken(alternate, is_static=True), "changes its sizes from .*: is_static must be False"),
        (Broken(follow_costs, uses_costs=False), "uses_costs must be True"),
        (Broken(is_static=None), "is_static must be True or False, got None"),
        (Broken(needs_common_steps=None), "needs_common_steps must be True or False, got None"),
        (Broken(accepts_narrower_limits=None), "narrower_limits must be True or False, got None"),
    ],
)
def test_the_contract_finds_what_is_broken(broken: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_policy(broken)


def test_the_contract_finds_who_trusts_in_costs() -> None:
    with pytest.raises((TypeError, AttributeError)):
        check_policy(Broken(trust_costs))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 8), "must have 3 sizes"),
        ((8, 8, 9), "must sum to 24"),
        ((2, 6, 16), "in multiples of 8"),
        ((0, 8, 16), r"must keep Limits\(minimum=1"),
        ((8, 0, 16), "must keep"),
        ([8, 8, 8], "must be a tuple"),
        ((8.0, 8.0, 8.0), "must be a tuple of Python's int"),
    ],
)
def test_check_plan(sizes: Any, message: str) -> None:
    check_plan((8, 8, 8), three(24, granularity=8))
    with pytest.raises(AssertionError, match=message):
        check_plan(sizes, three(24, granularity=8))
