"""Busy time, and rejecting outliers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lbbsp_core import BusyTimer, Measurement, OutlierFilter
from lbbsp_core.measure import OutlierFilterState, OverlapTimer

BAD = [math.nan, math.inf, -math.inf, 0.0, -1.0]


# BusyTimer


class FakeClock:
    """Clock in nanoseconds that only `advance` moves."""

    def __init__(self, nanoseconds: int = 0) -> None:
        self.now = nanoseconds

    def __call__(self) -> int:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


def test_busy_time_excludes_barriers() -> None:
    clock = FakeClock(123)
    timer = BusyTimer(clock)
    timer.start()
    for busy, wait in ((0.007, 0.003), (0.002, 0.010), (0.5, 0.0)):
        clock.advance(busy)
        assert timer.reach() == pytest.approx(busy)
        clock.advance(wait)
        assert timer.leave() == pytest.approx(busy + wait)


def test_collectives_inside_the_step_are_subtracted() -> None:
    clock = FakeClock()
    timer = BusyTimer(clock)
    timer.start()
    for _ in range(2):
        clock.advance(0.25)
        timer.pause()
        clock.advance(8.0)
        timer.resume()
    clock.advance(0.125)
    assert timer.reach() == 0.625
    assert timer.leave() == 16.625, "wall time includes collectives"
    clock.advance(0.5)
    assert timer.reach() == 0.5, "pauses do not carry over to the next step"


def test_gradients_on_their_way_at_once_count_once() -> None:
    clock = FakeClock()
    timer = OverlapTimer(clock)
    for expected in (6.0, 6.0):
        timer.begin()
        clock.advance(1)
        timer.begin()
        clock.advance(2)
        timer.end()
        clock.advance(1)
        timer.end()
        clock.advance(8)  # nothing is on its way
        timer.begin()
        clock.advance(2)
        timer.pause()
        clock.advance(32)  # the worker waits inside the step
        timer.resume()
        assert timer.reach() == expected
        clock.advance(16)  # the worker waits
        timer.end()
        timer.leave()
        timer.end()  # of a step that was left
    assert timer.reach() == 0


def test_start_discards_the_time_before() -> None:
    clock = FakeClock()
    timer = BusyTimer(clock)
    timer.start()
    clock.advance(60.0)
    timer.pause()
    clock.advance(1.0)
    timer.resume()
    timer.start()
    clock.advance(0.5)
    assert timer.reach() == 0.5
    assert timer.leave() == 0.5


def test_the_real_clock_is_monotonic() -> None:
    timer = BusyTimer()
    timer.start()
    busy = timer.reach()
    assert 0 <= busy <= timer.leave()


# OutlierFilter


def accepted(filter_: OutlierFilter, speeds: Iterable[float]) -> list[bool]:
    """Returns whether each of the measurements, of one second each, is accepted."""
    state, results = filter_.init(), []
    for speed in speeds:
        state, is_accepted = filter_.accept(state, Measurement(speed, 1.0))
        results.append(is_accepted)
    return results


@pytest.mark.parametrize("bad", BAD)
def test_invalid_measurements_are_rejected_and_keep_the_state(bad: float) -> None:
    filter_ = OutlierFilter(patience=2)
    for state in (filter_.init(), OutlierFilterState(10.0), OutlierFilterState(10.0, outliers=1)):
        assert filter_.accept(state, Measurement(10, bad)) == (state, False)
        assert filter_.accept(state, Measurement(bad, 1.0)) == (state, False)
    assert not any(accepted(filter_, [bad] * 9)), "invalid measurements make no new level"


@pytest.mark.parametrize(
    ("options", "speeds", "expected"),
    [
        ({}, [math.nan, 10, 11], [0, 1, 1]),  # the first valid one sets the level
        ({"factor": 5, "patience": 3}, [99, 99, 1, 1, 1, 1, 99], [1, 1, 0, 0, 1, 1, 0]),
        ({"factor": 5, "patience": 3}, [9, 9, 99, 99, 99, 99, 9], [1, 1, 0, 0, 1, 1, 0]),
        ({"factor": 5, "patience": 2}, [10, 0.1, 10, 0.1, 10], [1, 0, 1, 0, 1]),  # not consecutive
        ({}, [100, 230, 100, 44, 100, 400, 100, 25, 100], [1] * 9),  # as contention is
        ({"factor": 4}, [16, 4, 16, 3.999], [1, 1, 1, 0]),
        ({"patience": 1}, [1, 1e9, math.nan, 1], [1, 1, 0, 1]),
    ],
)
def test_outliers_are_rejected_until_they_are_the_new_level(options, speeds, expected) -> None:
    assert accepted(OutlierFilter(**options), speeds) == expected


@given(st.lists(st.floats(), max_size=30), st.integers(1, 4))
@example([5e-324, 1.0], 3)
@example([1.0, 1e-308, 1e308, 1e308], 2)
def test_only_finite_positive_speeds_are_accepted(seconds: list[float], patience: int) -> None:
    filter_ = OutlierFilter(patience=patience)
    state = filter_.init()
    for busy in seconds:
        measurement = Measurement(64, busy)
        state, is_accepted = filter_.accept(state, measurement)
        if is_accepted:
            assert 0 < measurement.samples_per_second < math.inf
        assert state.outliers < patience


@pytest.mark.parametrize("options", [{"factor": 1.0}, {"factor": math.nan}, {"patience": 0}])
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(
        ValueError, match=r"OutlierFilter\.(factor|patience).* must be finite and > 0"
    ):
        OutlierFilter(**options)  # type: ignore[arg-type]


def test_a_wait_that_outlasts_a_barrier_counts_from_the_barrier_on():
    ticks = iter([0, 1_000_000, 5_000_000, 7_000_000, 10_000_000])
    timer = BusyTimer(clock=lambda: next(ticks))
    timer.start()
    timer.pause()
    timer.leave()  # at 5 ms
    timer.resume()  # at 7 ms
    assert timer.reach() == pytest.approx(0.003)
