"""Measuring time alone, and believing the right measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lbbsp_core import BusyTimer, Measurement, OutlierFilter
from lbbsp_core.measure import OutlierFilterState
from lbbsp_core.testing import FakeClock

BAD = [math.nan, math.inf, -math.inf, 0.0, -1.0]


# BusyTimer


def test_busy_time_is_time_alone() -> None:
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
    assert timer.leave() == 16.625, "wall time keeps them"
    clock.advance(0.5)
    assert timer.reach() == 0.5, "and the next step does not"


def test_start_forgets_what_does_not_count() -> None:
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


# Gate


def accepted(gate: OutlierFilter, speeds: Iterable[float]) -> list[bool]:
    """What `gate` says of one measurement after the other, a second each."""
    state, said = gate.init(), []
    for speed in speeds:
        state, passes = gate.accept(state, Measurement(speed, 1.0))
        said.append(passes)
    return said


@pytest.mark.parametrize("bad", BAD)
def test_what_is_unusable_never_passes_and_changes_nothing(bad: float) -> None:
    gate = OutlierFilter(patience=2)
    for state in (gate.init(), OutlierFilterState(10.0), OutlierFilterState(10.0, outliers=1)):
        assert gate.accept(state, Measurement(10, bad)) == (state, False)
        assert gate.accept(state, Measurement(bad, 1.0)) == (state, False)
    assert not any(accepted(gate, [bad] * 9)), "however often"


def test_the_first_usable_one_sets_the_level() -> None:
    assert accepted(OutlierFilter(), [math.nan, 10.0, 11.0]) == [False, True, True]


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_an_outlier_is_held_until_it_is_the_new_level(outlier: float) -> None:
    gate = OutlierFilter(factor=5.0, patience=3)
    speeds = [100.0, 100.0, outlier, outlier, outlier, outlier, 100.0]
    assert accepted(gate, speeds) == [True, True, False, False, True, True, False]


def test_outliers_must_come_in_a_row() -> None:
    gate = OutlierFilter(factor=5.0, patience=2)
    assert accepted(gate, [10.0, 0.1, 10.0, 0.1, 10.0]) == [True, False, True, False, True]


@pytest.mark.parametrize("factor", [2.3, 1 / 2.3, 4.0, 1 / 4])
def test_contention_passes_at_once(factor: float) -> None:
    assert accepted(OutlierFilter(), [100.0, 100.0 * factor, 100.0]) == [True, True, True]


def test_the_borders_pass() -> None:
    assert accepted(OutlierFilter(factor=4.0), [16.0, 4.0, 16.0]) == [True, True, True]
    assert accepted(OutlierFilter(factor=4.0), [16.0, 3.999]) == [True, False]


def test_patience_of_one_holds_nothing_that_is_usable() -> None:
    assert accepted(OutlierFilter(patience=1), [1.0, 1e9, math.nan, 1.0]) == [
        True,
        True,
        False,
        True,
    ]


@given(st.lists(st.floats(), max_size=30), st.integers(1, 4))
@example([5e-324, 1.0], 3)
@example([1.0, 1e-308, 1e308, 1e308], 2)
def test_only_finite_positive_speeds_pass(seconds: list[float], patience: int) -> None:
    gate = OutlierFilter(patience=patience)
    state = gate.init()
    for busy in seconds:
        measurement = Measurement(64, busy)
        state, passes = gate.accept(state, measurement)
        if passes:
            assert 0 < measurement.samples_per_second < math.inf
        assert state.outliers < patience


@pytest.mark.parametrize("options", [{"factor": 1.0}, {"factor": math.nan}, {"patience": 0}])
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"Gate\.(factor|patience).* must be finite and > 0"):
        OutlierFilter(**options)  # type: ignore[arg-type]
