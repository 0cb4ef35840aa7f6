"""Fits of cost forms: they recover the form behind the points, and cross-validate."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import Affine, Cost, Profile, Proportional, Saturating
from lbbsp_core.cost.fitting import Fit, Point, best, fit_costs, repair

GRID = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]


def points(cost: Cost, noise: float = 0.0, seed: int = 0) -> list[Point]:
    rng = random.Random(seed)
    return [Point(x, cost(x) * (1 + noise * rng.uniform(-1, 1)), 5) for x in GRID]


@pytest.mark.parametrize(
    ("truth", "name"),
    [
        (Proportional(400.0), "proportional"),
        (Affine(0.02, 0.001), "affine"),
        (Saturating(0.05, 0.004, 0.002), "saturating"),
        (Profile(GRID, [0.01 + 0.001 * x + 0.0001 * x**2 for x in GRID]), "profile"),
    ],
)
def test_the_form_that_made_the_points_is_found_and_chosen(truth: Cost, name: str) -> None:
    fits = fit_costs(points(truth))
    assert list(fits) == ["proportional", "affine", "saturating", "profile"]
    assert best(fits) == name
    assert fits[name].cost(np.array(GRID)) == pytest.approx(truth(np.array(GRID)), rel=1e-4)
    assert fits[name].cv_error == pytest.approx(0, abs=1e-3 if name != "profile" else 0.2)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_two_percent_leaves_parameters_and_choice(seed: int) -> None:
    fits = fit_costs(repair(points(Saturating(0.05, 0.004, 0.002), 0.02, seed))[0])
    assert best(fits) == "saturating"
    cost = fits["saturating"].cost
    assert isinstance(cost, Saturating)
    assert cost.floor_seconds == pytest.approx(0.05, rel=0.03)
    assert cost.seconds_per_sample == pytest.approx(0.002, rel=0.03)


def test_affine_is_the_least_squares_solution() -> None:
    """Compares the sum of squared relative errors with that of neighbouring parameters."""
    own = repair(points(Affine(0.02, 0.001), 0.1))[0]
    cost = fit_costs(own)["affine"].cost
    assert isinstance(cost, Affine)

    def loss(c: float, m: float) -> float:
        return sum(((c + m * p.batch) / p.seconds - 1) ** 2 for p in own)

    c, m = cost.overhead_seconds, cost.seconds_per_sample
    for dc, dm in ((1e-4, 0), (-1e-4, 0), (0, 1e-4), (0, -1e-4), (1e-4, -1e-4)):
        assert loss(c, m) < loss(c * (1 + dc), m * (1 + dm))


def test_proportional_is_the_least_squares_solution() -> None:
    cost = fit_costs([Point(1, 1.0), Point(2, 3.0)])["proportional"].cost
    # d/dm of (m - 1)^2 + (2 m / 3 - 1)^2 is 0 at m = (1 + 2/3) / (1 + 4/9)
    assert cost(1) == pytest.approx((5 / 3) / (13 / 9))


def test_the_error_is_that_of_points_left_out() -> None:
    fits = fit_costs([Point(1, 1.0), Point(2, 3.0)])
    # from (2, 3.0): 1.5 instead of 1; from (1, 1.0): 2 instead of 3
    assert fits["proportional"].cv_error == pytest.approx((0.5 + 1 / 3) / 2, abs=1e-6)
    assert fits["affine"].cv_error is None
    assert "saturating" not in fits
    assert best(fits) == "proportional"


def test_one_point_is_fitted_without_cross_validation() -> None:
    fits = fit_costs([Point(4, 1.0)])
    assert {name: fit.cv_error for name, fit in fits.items()} == {
        "proportional": None,
        "profile": None,
    }
    assert best(fits) == "profile"


def test_a_flat_curve_is_fitted() -> None:
    fits = fit_costs([Point(x, 0.5) for x in GRID])
    for name in ("affine", "saturating", "profile"):
        assert fits[name].cost(64) == pytest.approx(0.5)


def test_parameters_make_the_cost_again() -> None:
    forms = {
        "proportional": Proportional, "affine": Affine,
        "saturating": Saturating, "profile": Profile,
    }  # fmt: skip
    for name, fit in fit_costs(points(Affine(0.02, 0.001), 0.01)).items():
        assert forms[name](**fit.parameters) == fit.cost


def test_fits_say_what_they_are() -> None:
    assert str(Fit(Affine(0.25, 0.5), None)) == (
        "Affine(overhead_seconds=0.25, seconds_per_sample=0.5)"
    )
    assert str(Fit(Profile([1, 2], [1.0, 2.0]), None)) == "Profile(2 points)"


def test_points_that_fall_are_refused() -> None:
    with pytest.raises(ValueError, match="must be nondecreasing"):
        fit_costs([Point(1, 2.0), Point(2, 1.0)])


# Repair


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12))
def test_repaired_points_never_fall_and_keep_the_largest_batch(times: list[float]) -> None:
    own = [Point(x, t) for x, t in enumerate(times, 1)]
    repaired, notes = repair(own)
    Profile([p.batch for p in repaired], [p.seconds for p in repaired])
    assert repaired[-1].batch == len(times)
    assert bool(notes) == (times != sorted(times))
    if not notes:
        assert repaired == own


def test_a_fall_at_the_end_promises_nothing_for_free() -> None:
    repaired, (note,) = repair([Point(1, 1.0), Point(2, 3.0), Point(4, 2.0)])
    assert repaired == [Point(1, 1.0), Point(4, 2.5)]
    assert note == (
        "batches 2 to 4 took less time as they grew: all of them are given the mean time, which "
        "differs from the measured ones by at most 20.0%"
    )


def test_noise_on_a_flat_curve_leaves_it_flat() -> None:
    repaired, _ = repair([Point(1, 1.5), Point(2, 1.25), Point(4, 1.0)])
    assert repaired == [Point(1, 1.25), Point(2, 1.25), Point(4, 1.25)]
    fits = fit_costs(repaired)
    assert fits[best(fits)].cost(64) == pytest.approx(1.25)
