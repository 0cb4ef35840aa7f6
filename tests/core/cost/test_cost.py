"""Cost curves: shape x slowness."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import Affine, Cost, Limits, Profile, Proportional, Saturating, allocate
from lbbsp_core.cost import AffineArray, least_slowest, slowest
from lbbsp_core.cost.profile_file import write_document

speeds = st.floats(1e-3, 1e6)
batches = st.integers(0, 10**6)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    xs = sorted(draw(st.sets(st.integers(1, 10**5), min_size=1, max_size=8)))
    steps = draw(st.lists(st.floats(0.0, 10.0), min_size=len(xs), max_size=len(xs)))
    return Profile(xs, [1e-3 + sum(steps[: i + 1]) for i in range(len(xs))])


costs = st.one_of(
    st.builds(Proportional, speeds),
    st.builds(Affine, st.floats(0.0, 10.0), st.floats(1e-6, 1e3)),
    st.builds(Saturating, st.floats(0.0, 10.0), st.floats(0.0, 1.0), st.floats(1e-6, 1e3)),
    profiles(),
)


def test_closed_forms() -> None:
    assert Proportional(50.0)(10) == 0.2
    affine = Affine(0.010, 0.001)
    assert affine(20) == pytest.approx(0.030)
    assert affine.overhead_samples == pytest.approx(10.0)
    assert affine.effective_samples(20) == pytest.approx(30.0)
    assert Proportional(50.0).effective_samples(20) == 20


@given(st.lists(st.builds(Affine, st.floats(0.0, 1.0), st.floats(1e-3, 1.0)), min_size=1))
def test_no_plan_takes_less_than_the_bound(lines: list[Affine]) -> None:
    total, minima = 1000 * len(lines), [0] * len(lines)
    best = slowest(lines, allocate(lines, total=total).tolist())
    arrays = AffineArray(*(np.array(each) for each in zip(*map(astuple, lines), strict=True)))
    bound = least_slowest(lines, total, minima)
    assert bound == pytest.approx(least_slowest(arrays, total, minima))
    assert best - max(line.seconds_per_sample for line in lines) <= bound <= best, (
        "but for rounding"
    )
    mixed = [*lines, Saturating(1.0, 0.1, 0.01)]
    assert least_slowest(mixed, total, [*minima, 9]) == pytest.approx(slowest(mixed, [*minima, 9]))


@given(
    st.lists(st.tuples(costs, st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=4),
    st.data(),
)
def test_no_plan_within_limits_takes_less_than_the_bound(
    workers: list[tuple[Cost, int, int]], data: st.DataObject
) -> None:
    curves = [cost for cost, _, _ in workers]
    limits = [Limits(low, max(low, 1) + more) for _, low, more in workers]
    minima, maxima = [each.minimum for each in limits], [each.maximum for each in limits]
    total = data.draw(st.integers(max(sum(minima), 1), sum(maxima)))
    best = slowest(curves, allocate(curves, total=total, limits=limits).tolist())
    assert slowest(curves, minima) * (1 - 1e-8) <= least_slowest(curves, total, minima) <= best


@given(costs, batches)
def test_seconds_are_shape_over_speed(cost: Cost, x: int) -> None:
    speed = 7.0
    at_speed = cost.at_speed(speed)
    assert at_speed(x) == pytest.approx(cost.effective_samples(x) / speed, rel=1e-6)
    assert at_speed.effective_samples(x) == pytest.approx(cost.effective_samples(x), rel=1e-9)


@given(costs, speeds, st.integers(1, 10**4))
def test_the_speed_that_is_measured_is_the_speed_that_was_set(
    cost: Cost, speed: float, x: int
) -> None:
    """Checks that the input of a predictor does not depend on the batch size (rule 5)."""
    busy_seconds = cost.at_speed(speed)(x)
    assert cost.effective_samples(x) / busy_seconds == pytest.approx(speed, rel=1e-9)


@given(costs, st.lists(batches, min_size=1, max_size=5))
def test_an_array_of_batches_is_elementwise(cost: Cost, xs: list[int]) -> None:
    assert cost(np.array(xs)).tolist() == [cost(x) for x in xs]


@given(costs, batches, batches)
def test_nondecreasing_and_as_their_segments_say(cost: Cost, a: int, b: int) -> None:
    assert cost(min(a, b)) <= cost(max(a, b))
    segments = cost.segments()
    starts = [start for start, _, _ in segments]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert all(isinstance(start, int) for start in starts)
    start, seconds, slope = [segment for segment in segments if segment[0] <= a][-1]
    assert seconds + slope * (a - start) == pytest.approx(cost(a), rel=1e-9)


@given(costs)
def test_values_that_compare_hash_and_pickle(cost: Cost) -> None:
    twin = pickle.loads(pickle.dumps(cost))
    assert twin == cost
    assert hash(twin) == hash(cost)
    assert isinstance(cost, Cost)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (Proportional, "Proportional.samples_per_second"),
        (lambda bad: Affine(0.0, bad), "Affine.seconds_per_sample"),
        (lambda bad: Affine(bad, 0.001), "Affine.overhead_seconds"),
        (Proportional().at_speed, "samples_per_second"),
        (lambda bad: Saturating(bad, 0.0, 1.0), "Saturating.floor_seconds"),
        (lambda bad: Saturating(0.0, bad, 1.0), "Saturating.overhead_seconds"),
        (lambda bad: Saturating(0.0, 0.0, bad), "Saturating.seconds_per_sample"),
    ],
)
def test_parameters_out_of_range_are_named(build, name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .* got {bad!r}"):
        build(bad)


def test_a_speed_of_zero_is_named() -> None:
    for build in (Proportional, Proportional().at_speed, lambda bad: Affine(0.0, bad)):
        with pytest.raises(ValueError, match=r"must be .* got 0\.0"):
            build(0.0)


# Saturating


def test_flat_until_saturated() -> None:
    cost = Saturating(0.5, 0.125, 0.0625)
    assert [cost(x) for x in (0, 1, 6, 7, 10)] == [0.5, 0.5, 0.5, 0.5625, 0.75]
    assert cost.segments() == ((0, 0.5, 0.0), (6, 0.5, 0.0625))
    assert Saturating(0.5, 0.125, 0.25).segments() == ((0, 0.5, 0.0), (2, 0.625, 0.25))
    assert [cost.effective_samples(x) for x in (1, 6, 10)] == [8, 8, 12]
    assert cost.at_speed(32.0) == Saturating(0.25, 0.0625, 0.03125)


def test_a_floor_that_the_line_never_meets_or_never_leaves() -> None:
    assert Saturating(0.1, 0.2, 0.5).segments() == Affine(0.2, 0.5).segments()
    assert Saturating(1.0, 0.0, 1e-300).segments() == ((0, 1.0, 0.0),)


# Profile


def test_lines_between_points_and_beyond_them() -> None:
    cost = Profile([4, 8, 16], [1.0, 1.5, 3.5])
    assert [cost(x) for x in (0, 2, 4, 6, 8, 12, 16, 20)] == [
        0.5, 0.75, 1.0, 1.25, 1.5, 2.5, 3.5, 4.5,
    ]  # fmt: skip
    assert cost.segments() == ((0, 0.5, 0.125), (4, 1.0, 0.125), (8, 1.5, 0.25), (16, 3.5, 0.25))
    assert Profile([4, 8], [1.0, 4.0])(2) == 0.5  # never below zero: a line from the origin
    assert Profile([4], [1.0]).segments() == ((0, 0.0, 0.25), (4, 1.0, 0.25))
    assert Profile([4, 8], [1.0, 1.0])(100) == 1.0


def test_the_shape_of_a_profile_is_expressed_at_the_speed_of_its_largest_batch() -> None:
    cost = Profile([4, 8, 16], [1.0, 1.5, 4.0], out_of_memory_at=20)
    assert [cost.effective_samples(x) for x in (4, 8, 16)] == [4, 6, 16]
    assert cost.at_speed(8.0) == Profile([4, 8, 16], [0.5, 0.75, 2.0], out_of_memory_at=20)


def test_arrays_lists_and_numpy_numbers_make_the_same_profile() -> None:
    plain = Profile((4, 8), (1.0, 2.0))
    assert Profile(np.array([4, 8]), np.array([1.0, 2.0])) == plain
    assert hash(Profile([4, 8], [1, 2])) == hash(plain)


def test_memory_caps_become_limits() -> None:
    assert Profile([4], [1.0]).limits() == Limits(1, None)
    assert Profile([4], [1.0], out_of_memory_at=9).limits(2) == Limits(2, 8)


@pytest.mark.parametrize(
    ("batches", "seconds", "cap", "words"),
    [
        ([], [], None, "at least one batch and one time for each batch, got 0 batches"),
        ([1, 2], [1.0], None, "2 batches and 1 seconds"),
        ([0, 2], [1.0, 2.0], None, "batches must be >= 1, got 0"),
        ([2, 2], [1.0, 2.0], None, "must be ascending, got 2 after 2: sort"),
        ([2, 1], [1.0, 2.0], None, "must be ascending, got 1 after 2: sort"),
        ([1.5, 2], [1.0, 2.0], None, r"must be integers, in samples, got \[1.5, 2\]"),
        ([1, 2], [1.0, math.nan], None, "finite and > 0, got nan at 2 samples: measure"),
        ([1, 2], [1.0, math.inf], None, "finite and > 0, got inf at 2 samples: measure"),
        ([1, 2], [0.0, 1.0], None, "finite and > 0, got 0.0 at 1 samples: measure"),
        ([1, 2], [1.0, "x"], None, "must be numbers"),
        ([1, 2], [1.0, 0.5], None, "nondecreasing, got 0.5 at 2 samples after 1.0 at 1: measure"),
        ([1, 2], [1.0, 2.0], 2, "above the largest measured batch 2, got 2: remove"),
        ([1, 2], [1.0, 2.0], 2.5, "None or an integer .* got 2.5"),
    ],
)
def test_bad_points_are_named_with_a_remedy(batches, seconds, cap, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Profile(batches, seconds, cap)


# Its file


@given(profiles(), st.one_of(st.none(), st.integers(10**6, 10**7)))
def test_what_is_saved_is_loaded(tmp_path_factory, profile: Profile, cap: int | None) -> None:
    profile = Profile(profile.batches, profile.seconds, cap)
    path = tmp_path_factory.mktemp("profile") / "deep" / "gpu.json"
    pairs = zip(profile.batches, profile.seconds, strict=True)
    points = [{"batch": batch, "seconds": seconds} for batch, seconds in pairs]
    write_document(path, {"schema": 1, "points": points, "out_of_memory_at": cap})
    assert Profile.load(path) == profile
    assert [file.name for file in path.parent.iterdir()] == ["gpu.json"]


GOOD = {"schema": 1, "points": [{"batch": 1, "seconds": 1.0}], "out_of_memory_at": None}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps(GOOD)[:-9], "the file is not JSON: .*: create it again"),
        ("", "the file is not JSON"),
        (b"\xff\xfe", "the file is not JSON"),
        ("[]", "must be a profile with a schema: create it again"),
        ("{}", "must be a profile with a schema"),
        ({"schema": 2}, "schema must be 1, got 2: create it again"),
        ({"schema": "1"}, "schema must be 1, got '1'"),
        ({"points": []}, r"points must be a non-empty list, got \[\]"),
        ('{"schema": 1}', "points must be a non-empty list, got None"),
        ({"points": [{"batch": 1}]}, r"points\[0\] must have an integer batch .* \{'batch': 1\}"),
        ({"points": [{"batch": 1.5, "seconds": 1}]}, r"points\[0\] must have an integer batch"),
        ({"points": [{"batch": 1, "seconds": True}]}, r"points\[0\] must have an integer batch"),
        ({"points": [{"batch": 1, "seconds": math.nan}]}, "NaN is not a finite number"),
        ({"points": [{"batch": 1, "seconds": 1e-320}]}, "seconds between 1e-12 and 1e12, got"),
        ({"points": [{"batch": 2**63, "seconds": 1.0}]}, r"below 2\^53"),
        ({"out_of_memory_at": 2**63}, r"out_of_memory_at must be below 2\^53"),
        ({"out_of_memory_at": 1}, "largest measured batch 1, got 1"),
        ({"out_of_memory_at": "9"}, "None or an integer .* got '9'"),
        (
            {"points": [{"batch": b, "seconds": 1 / b} for b in (1, 2)]},
            "must be nondecreasing, got 0.5 at 2 samples after 1.0 at 1: measure",
        ),
    ],
)
def test_a_bad_file_is_named_with_a_remedy(tmp_path, content: str | bytes | dict, words: str):
    """Content is that of the file, or what it changes of a good one."""
    path = tmp_path / "gpu.json"
    text = json.dumps(GOOD | content) if isinstance(content, dict) else content
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=words) as caught:
        Profile.load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        Profile.load(tmp_path / "none.json")
