"""`allocate` against exhaustive search and a one-granule-at-a-time reference."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import Affine, Limits, Profile, Proportional, Saturating, allocate
from lbbsp_core._selection import Ladders

Plan = tuple[int, ...]
Problem = tuple[list["Curve"], int, list[Limits], int]


@dataclass(frozen=True)
class Curve:
    """Any nondecreasing piecewise linear cost: (start, seconds at start, seconds per sample)."""

    pieces: tuple[tuple[int, float, float], ...]

    def __call__(self, x: float) -> float:
        start, seconds, slope = [piece for piece in self.pieces if piece[0] <= x][-1]
        return seconds + slope * (x - start)

    def segments(self) -> tuple[tuple[int, float, float], ...]:
        return self.pieces


# References


def allowed(bounds: Limits, total: int, grain: int, remainder: int) -> list[int]:
    maximum = total if bounds.maximum is None else min(bounds.maximum, total)
    return [x for x in range(bounds.minimum, maximum + 1) if x % grain == remainder]


def plans(limits: Sequence[Limits], total: int, grain: int) -> list[Plan]:
    """Returns every feasible plan, by trying all compositions."""
    found: list[Plan] = []
    for special in range(len(limits)) if total % grain else [-1]:
        choices = [
            allowed(bounds, total, grain, total % grain if rank == special else 0)
            for rank, bounds in enumerate(limits)
        ]
        found += [
            (*head, last)
            for head in itertools.product(*choices[:-1])
            if (last := total - sum(head)) in choices[-1]
        ]
    return found


def optimum(costs: Sequence[Curve], possible: Sequence[Plan], total: int) -> float:
    """Returns the smallest time of the slowest worker over all possible plans."""
    seconds = np.array([[cost(x) for x in range(total + 1)] for cost in costs])
    return float(seconds[np.arange(len(costs)), np.array(possible)].max(axis=1).min())


def slowest(costs: Sequence[Curve], sizes: Sequence[int]) -> float:
    return max(cost(x) for cost, x in zip(costs, sizes, strict=True))


def greedy(costs: Sequence[Curve], limits: Sequence[Limits], total: int, grain: int) -> Plan:
    """Returns the documented plan, one granule at a time, trying each worker for a remainder."""
    if total % grain == 0:
        return greedy_with(costs, [allowed(b, total, grain, 0) for b in limits], total, grain)
    tried = []
    for special in range(len(limits)):
        choices = [
            allowed(bounds, total, grain, total % grain if rank == special else 0)
            for rank, bounds in enumerate(limits)
        ]
        lows, highs = sum(c[0] for c in choices if c), sum(c[-1] for c in choices if c)
        if all(choices) and lows <= total <= highs:
            plan = greedy_with(costs, choices, total, grain)
            tried.append((slowest(costs, plan), special, plan))
    return min(tried)[2]


def greedy_with(
    costs: Sequence[Curve], choices: Sequence[list[int]], total: int, grain: int
) -> Plan:
    """Takes the cheapest next granule again and again; equal prices round after round."""
    sizes = [batches[0] for batches in choices]

    def price_of_next(rank: int) -> float:
        x = sizes[rank] + grain
        return costs[rank](x) if x <= choices[rank][-1] else math.inf

    prices = [price_of_next(rank) for rank in range(len(costs))]
    remaining = (total - sum(sizes)) // grain
    while remaining > 0:
        price = min(prices)
        while remaining > 0 and price in prices:
            takers = [rank for rank, other in enumerate(prices) if other == price][:remaining]
            for rank in takers:
                sizes[rank] += grain
                prices[rank] = price_of_next(rank)
            remaining -= len(takers)
    return tuple(sizes)


# Random small cases: all numbers are multiples of 1/16, so floats are exact and ties abound


def random_cost(rng: random.Random) -> Curve | Affine | Proportional | Profile | Saturating:
    form = rng.randrange(5)
    slope = rng.randint(1, 12) / 16
    if form == 0:
        return Proportional(2.0 ** rng.randint(-2, 3))
    if form == 1:
        return Affine(rng.randint(0, 40) / 16, slope)
    if form == 2:
        return Saturating(rng.randint(0, 60) / 16, rng.randint(0, 20) / 16, slope)
    if form == 3:
        return random_profile(rng)
    pieces, start, seconds = [], 0, rng.randint(0, 20) / 16
    for _ in range(rng.randint(1, 4)):
        slope = rng.choice((0, 0, 1, 2, 5, 9)) / 16
        pieces.append((start, seconds, slope))
        length = rng.randint(1, 6)
        start, seconds = start + length, seconds + slope * length + rng.choice((0, 0, 3)) / 16
    return Curve(tuple(pieces))


def random_profile(rng: random.Random) -> Profile:
    """Returns points a power of two apart, so that the slopes between them are exact."""
    batches, times = [2 ** rng.randint(0, 2)], [rng.randint(1, 40) / 16]
    for _ in range(rng.randint(0, 4)):
        length = 2 ** rng.randint(0, 3)
        batches.append(batches[-1] + length)
        times.append(times[-1] + rng.choice((0, 0, 1, 2, 5, 9)) * length / 16)
    return Profile(batches, times)


def random_limits(rng: random.Random, total: int) -> Limits:
    minimum = rng.choice((0, 0, 1, 1, 2, rng.randint(0, max(1, total // 2))))
    if rng.random() < 0.4:
        return Limits(minimum)
    return Limits(minimum, minimum + rng.randint(0, total))


def random_case(seed: int) -> tuple[list[Curve], list[Limits], int, int]:
    rng = random.Random(seed)
    workers = rng.choice((1, 2, 2, 3, 3, 4))
    total = rng.randint(0, {1: 60, 2: 60, 3: 30, 4: 18}[workers])
    costs = [random_cost(rng) for _ in range(workers)]
    if rng.random() < 0.2:
        costs = [costs[0]] * workers
    limits = [random_limits(rng, total) for _ in range(workers)]
    return costs, limits, total, rng.choice((1, 1, 1, 2, 3, 4, 8))


@pytest.mark.parametrize(
    "block", [*range(5), *(pytest.param(k, marks=pytest.mark.campaign) for k in range(5, 20))]
)
def test_small_cases_agree_with_exhaustive_search(block: int) -> None:
    feasible = with_remainder = 0
    for seed in range(200 * block, 200 * (block + 1)):
        costs, limits, total, grain = random_case(seed)
        possible = plans(limits, total, grain)
        if not possible:
            with pytest.raises(ValueError, match=r"^total (must be|=) "):
                allocate(costs, total=total, limits=limits, granularity=grain)
            continue
        feasible, with_remainder = feasible + 1, with_remainder + (total % grain > 0)
        sizes = allocate(costs, total=total, limits=limits, granularity=grain)
        plan = tuple(sizes.tolist())
        assert plan in possible, seed
        assert slowest(costs, plan) == optimum(costs, possible, total), seed
        assert plan == greedy(costs, limits, total, grain), seed
    assert 50 < feasible < 195  # the cases cover infeasible ones and remainders
    assert with_remainder > 15


@pytest.mark.parametrize("seed", range(12))
def test_arbitrary_floats_reach_the_optimum_to_rounding(seed: int) -> None:
    rng = random.Random(seed)
    costs = [
        Affine(10 ** rng.uniform(-4, 0), 10 ** rng.uniform(-5, -1))
        for _ in range(rng.randint(2, 9))
    ]
    limits = [Limits(1, rng.randint(400, 800)) for _ in costs]
    sizes = allocate(costs, total=300, limits=limits)
    best = slowest(costs, greedy(costs, limits, 300, 1))
    assert slowest(costs, sizes.tolist()) == pytest.approx(best, rel=1e-14)


# Documented behaviour


def test_a_granularity_beyond_the_total_leaves_one_worker_all() -> None:
    costs = [Proportional(1.0), Proportional(2.0)]
    assert allocate(costs, total=5, limits=[Limits(0)] * 2, granularity=10**30).tolist() == [0, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"total": 6, "limits": [Limits(4), Limits(4)]},
            r"total must be at least the sum of minima = 8, got 6: raise the global batch size, "
            r"or lower Limits\.minimum",
        ),
        (
            {"total": 9, "limits": [Limits(1, 4), Limits(1, 4)]},
            r"total must be at most the sum of maxima = 8, got 9: .*raise Limits\.maximum",
        ),
        (
            {"total": 8, "limits": [Limits(3, 5)] * 2, "granularity": 8},
            r"total = 8 .* granularity = 8, .*lower granularity",
        ),
        ({"total": 8, "granularity": 0}, "granularity must be an integer >= 1, got 0"),
        ({"total": 8, "granularity": 1.5}, "granularity must be an integer >= 1, got 1.5"),
        ({"total": -1}, "total must be an integer >= 0, got -1"),
        ({"total": 8.0}, "total must be an integer >= 0, got 8.0"),
        ({"total": "8"}, "total must be an integer >= 0, got '8'"),
        ({"total": 2**53}, r"workers \* total must be below 2\*\*53"),
        (
            {"total": 8, "limits": [Limits()]},
            "one entry for each of the 2 workers, got 1: pass one Limits per worker",
        ),
    ],
)
def test_errors_name_constraint_value_and_remedy(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate([Proportional(1.0), Proportional(2.0)], **options)


@pytest.mark.parametrize(
    "pieces",
    [
        ((0, math.nan, 1.0),),
        ((0, 0.0, math.nan),),
        ((0, math.inf, 1.0),),
        ((0, 0.0, math.inf),),
        ((0, -1.0, 1.0),),
        ((0, 1.0, -1.0),),
        ((1, 1.0, 1.0),),
        ((0, 1.0, 1.0), (4, 2.0, 1.0)),
        ((0, 1.0, 0.0), (4, 0.5, 1.0)),
        ((0, 1.0, 0.0), (0, 1.0, 1.0)),
        ((0, 1.0, 0.0), (4, 1.0, 1.0), (3, 9.0, 1.0)),
        ((0, 1.0, 0.0), (4.5, 1.0, 1.0)),
        ((0, 1.0, 0.0), (math.nan, 1.0, 1.0)),
    ],
)
@pytest.mark.parametrize("friend", [Proportional(1.0), Saturating(1.0, 0.0, 0.5)])
def test_bad_costs_are_refused_by_rank(pieces: tuple, friend: Curve) -> None:
    with pytest.raises(ValueError, match=r"the cost of worker 1 must be finite, .*measure or fit"):
        allocate([friend, Curve(pieces), friend], total=10)


def test_no_costs_or_no_segments() -> None:
    for costs in ([], [Curve(())], [Proportional(1.0), Curve(())]):
        with pytest.raises(ValueError, match="at least one segment"):
            allocate(costs, total=10)


def test_a_minimum_above_the_maximum_is_refused() -> None:
    unchecked = [SimpleNamespace(minimum=5, maximum=3), Limits(0, 20)]
    with pytest.raises(ValueError, match="within the limits"):
        allocate([Proportional(1.0)] * 2, total=10, limits=unchecked)


def test_rounding_at_a_joint_is_no_fall() -> None:
    joint = Curve(((0, 0.3, 0.0), (3, math.nextafter(0.3, 0.0), 0.1)))
    assert allocate([joint, Affine(0.1, 0.1)], total=20).sum() == 20


# Extremes


def test_speeds_many_orders_apart() -> None:
    costs = [Affine(0.0, 1e-150), Affine(0.0, 1e-149), Affine(1e-3, 1e30), Affine(1e150, 1e150)]
    assert allocate(costs, total=1100).tolist() == [999, 99, 1, 1]


def test_prices_of_the_smallest_and_largest_floats() -> None:
    assert allocate([Affine(5e-324, 5e-324)] * 2, total=10).sum() == 10
    assert allocate([Affine(1e200, 1e200)] * 2, total=10).tolist() == [5, 5]


def test_times_at_the_border_of_the_integer_range() -> None:
    """Uses a slowest time of 1 second, a power of two, rounded in either direction."""
    for samples in range(2, 400, 5):
        speed = Proportional(float(samples))
        assert allocate([speed, speed], total=2 * samples).tolist() == [samples, samples]


def test_the_search_is_short_for_any_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts evaluations on jumps, plateaus and slopes twelve orders of magnitude apart."""
    rungs, evaluations = Ladders.rungs, 0

    def counted(self: object, time: float) -> object:
        nonlocal evaluations
        evaluations += 1
        assert evaluations <= 80
        return rungs(self, time)

    monkeypatch.setattr(Ladders, "rungs", counted)
    rng = random.Random(1)
    for _ in range(100):
        costs = [rough_cost(rng) for _ in range(rng.randint(2, 40))]
        evaluations, total = 0, int(10 ** rng.uniform(3, 7))
        assert allocate(costs, total=total).sum() == total


def rough_cost(rng: random.Random) -> Curve:
    pieces, start, seconds = [], 0, 10 ** rng.uniform(-6, 2)
    for _ in range(rng.randint(1, 6)):
        slope = rng.choice([0.0, 10 ** rng.uniform(-12, 1)])
        pieces.append((start, seconds, slope))
        length = int(10 ** rng.uniform(0, 6))
        start, leap = start + length, rng.choice([0.0, 10 ** rng.uniform(-9, 2)])
        seconds += slope * length + leap
    return Curve(tuple(pieces))


def test_huge_batches() -> None:
    sizes = allocate([Proportional(1.0), Proportional(3.0)], total=2**30)
    assert sizes.tolist() == [2**28, 3 * 2**28]
    sizes = allocate([Proportional(1.0), Proportional(3.0)], total=2**50)
    assert sizes.sum() == 2**50
    assert sizes[0] == pytest.approx(2**48, rel=1e-3)  # a granule is a thousand ticks then


@pytest.mark.parametrize("grain", [8, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_hundred_thousand_workers(grain: int) -> None:
    rng = np.random.default_rng(0)
    overheads, slopes = rng.uniform(0, 0.02, 100_000), rng.uniform(0.001, 0.005, 100_000)
    costs = [Affine(c, m) for c, m in zip(overheads.tolist(), slopes.tolist(), strict=True)]
    sizes = allocate(costs, total=6_400_000, granularity=grain)
    assert sizes.sum() == 6_400_000
    assert not (sizes % grain).any()
    assert (overheads + slopes * sizes).max() <= (overheads + slopes * (sizes + grain)).min()


def test_the_same_plan_on_every_processor() -> None:
    """Compares with a recorded plan: it must not depend on processor, platform or NumPy."""
    rng = random.Random(7)  # Python's own generator and float division are the same everywhere
    costs = [Affine(rng.random() / 64, rng.random() / 256) for _ in range(12)]
    plan = allocate(costs, total=1000, granularity=4, limits=[Limits(1, 300)] * 12)
    assert plan.tolist() == [100, 188, 36, 28, 36, 176, 16, 68, 12, 32, 264, 44]
    costs = [Affine(rng.random() / 64, rng.random() / 256) for _ in range(1000)]
    plan = allocate(costs, total=64003, granularity=4)
    assert sum(plan.tolist()[::3]) == 14339


# Larger problems

slopes = st.integers(1, 4096).map(lambda n: n / 2**14)
overheads = st.integers(0, 4096).map(lambda n: n / 2**10)
affine = st.builds(Affine, overheads, slopes)
any_cost = st.integers(0, 2**32).map(lambda seed: random_cost(random.Random(seed)))
curves = st.lists(any_cost, min_size=1, max_size=40)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draws a feasible problem of moderate size: the limits admit a plan drawn first."""
    costs = draw(curves)
    grain = draw(st.sampled_from([1, 1, 2, 8, 32]))
    plan = [grain * draw(st.integers(1, 12)) for _ in costs]
    limits = [
        Limits(
            draw(st.integers(0, size)),
            draw(st.one_of(st.none(), st.integers(size + grain, 4 * size + grain))),
        )
        for size in plan
    ]
    return costs, sum(plan) + draw(st.integers(0, grain - 1)), limits, grain


@given(problems(), st.integers(-40, 40))
def test_larger_problems_agree_with_the_greedy_reference_in_any_unit_of_time(
    problem: Problem, power: int
) -> None:
    """The plan of the reference is monotonic in all speeds and in the global batch size."""
    costs, total, limits, grain = problem
    scaled = [
        Curve(tuple((s, t * 2.0**power, m * 2.0**power) for s, t, m in cost.segments()))
        for cost in costs
    ]
    sizes = allocate(costs, total=total, limits=limits, granularity=grain)
    again = allocate(scaled, total=total, limits=limits, granularity=grain)
    assert sizes.dtype == np.int64
    assert tuple(sizes.tolist()) == tuple(again.tolist()) == greedy(costs, limits, total, grain)


@given(st.lists(affine, min_size=1, max_size=60), st.integers(1, 200))
def test_one_segment_or_the_same_line_in_two(costs: list[Affine], share: int) -> None:
    """Compares the path for curves of one segment with the general one."""
    total = share * len(costs)
    split = [
        Curve(((0, c.overhead_seconds, c.seconds_per_sample), (9, c(9), c.seconds_per_sample)))
        for c in costs
    ]
    assert allocate(costs, total=total).tolist() == allocate(split, total=total).tolist()
