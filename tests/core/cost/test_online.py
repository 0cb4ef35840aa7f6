"""Online learning of the overhead: closed forms, and steps that must not be learned from."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import Affine, CostShape, Proportional
from lbbsp_core.cost import Cost
from lbbsp_core.cost.online import CostShapeState

X, N = 192, 3


def learned(shape: CostShape, cost: Cost, sizes: list[int], noise: float = 0.0) -> CostShapeState:
    rng, state = random.Random(0), shape.init()
    for x in sizes:
        state = shape.learn(state, x, cost(x) * (1 + noise * rng.uniform(-1, 1)))
    return state


@given(
    kappa=st.floats(0, 32),
    speed=st.floats(1, 1e5),
    prior=st.sampled_from([0.0, 5.0, 20.0]),
    sizes=st.lists(st.integers(1, X), min_size=2, max_size=40),
)
def test_noiseless_steps_lead_from_the_prior_towards_the_truth(kappa, speed, prior, sizes):
    cost = Affine(kappa / speed, 1 / speed)
    shape = CostShape(Affine(prior, 1.0), max_overhead=32)
    found = learned(shape, cost, sizes).overhead
    low, high = sorted((prior, kappa))
    assert low - 1e-6 <= found <= high + 1e-6


def test_many_large_changes_find_the_truth():
    shape = CostShape(Proportional(), max_overhead=32)
    state = learned(shape, Affine(0.020, 0.001), [40, 80] * 200)
    assert state.overhead == pytest.approx(20, abs=0.5)
    assert shape.effective_samples(state, 40) == pytest.approx(60, abs=0.5)


def test_the_equation_by_hand():
    """z = a = 2/3 (of 100 and 50 samples at kappa 0): (0 + z c) / (1 + z a), c = 50 * 10 / 80."""
    shape = CostShape(Proportional(), max_overhead=32)
    state = shape.learn(shape.learn(shape.init(), 100, 1.10), 50, 0.60)
    z, a, c = 50 / 75, 0.5 / 0.85, (100 * 0.6 - 50 * 1.1) / 0.85
    assert state.overhead == pytest.approx(z * c / (1 + z * a), rel=1e-12)


def test_a_change_of_speed_is_not_taken_for_overhead():
    shape = CostShape(Affine(10.0, 1.0), max_overhead=32)
    state = shape.init()
    for speed, x in [(100, 64), (100, 64), (25, 64), (25, 20), (100, 20), (100, 64)] * 20:
        state = shape.learn(state, x, (x + 10) / speed)
    assert state.overhead == pytest.approx(10, rel=1e-9)


def test_neighbours_only():
    shape = CostShape(Proportional(), max_overhead=32)
    state = shape.skip(shape.learn(shape.init(), 100, 1.2))
    assert shape.learn(state, 40, 0.6).overhead == 0


def test_small_changes_among_noise_are_ignored():
    """Lets sizes respond to noise, as in closed loop: the overhead must stay as it is."""
    rng, shape = random.Random(1), CostShape(Affine(15.0, 1.0), max_overhead=32)
    state, speed = shape.init(), 100.0
    for _ in range(2000):
        x = max(1, round(64 * speed / 100))
        seconds = (x + 15) / 100 * (1 + rng.gauss(0, 0.1))
        state = shape.learn(state, x, seconds)
        speed += 0.5 * ((x + 15) / seconds - speed)
    assert state.overhead == pytest.approx(15, abs=3)


def test_never_beyond_its_bounds():
    shape = CostShape(Proportional(), max_overhead=8)
    assert learned(shape, Affine(1.0, 0.001), [20, 100] * 50).overhead == 8
    assert (
        learned(
            CostShape(Affine(5.0, 1.0), max_overhead=8), Proportional(), [20, 100] * 500
        ).overhead
        < 0.1
    )
