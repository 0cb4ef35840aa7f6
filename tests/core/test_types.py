"""Measurements and limits."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lbbsp_core import Limits, Measurement
from lbbsp_core.types import training_limits

BAD = [math.nan, math.inf, -math.inf, 0.0, -1.0]
IMPLAUSIBLE = [1e13, 1e-13, 1e308, 5e-324]


def test_speed_is_samples_per_busy_second() -> None:
    assert Measurement(samples=32, busy_seconds=0.5).samples_per_second == 64.0
    speeds = Measurement(np.array([8.0, 9.0]), np.array([2.0, 3.0])).samples_per_second
    assert speeds.tolist() == [4.0, 3.0]


@pytest.mark.parametrize("bad", BAD + IMPLAUSIBLE)
def test_implausible_values_are_not_valid(bad: float) -> None:
    assert not Measurement(32, bad).is_valid
    assert not Measurement(bad, 0.5).is_valid
    assert not Measurement(np.array([1.0, 2.0]), np.array([0.5, bad])).is_valid


@given(st.integers(1, 10**6), st.floats())
@example(64, 5e-324)
@example(64, 1e-308)
@example(1, 1e308)
def test_valid_measurements_have_finite_positive_speeds(samples: int, seconds: float) -> None:
    measurement = Measurement(samples, seconds)
    if measurement.is_valid:
        assert 0.0 < measurement.samples_per_second < math.inf


def test_valid_arrays() -> None:
    assert Measurement(np.array([1.0, 2.0]), np.array([0.5, 0.25])).is_valid
    assert isinstance(Measurement(np.array([1.0]), np.array([0.5])).is_valid, bool)


def test_a_measurement_is_frozen_and_pickles() -> None:
    measurement = Measurement(32, 0.5, (12.0, 40.0))
    assert pickle.loads(pickle.dumps(measurement)) == measurement
    with pytest.raises(dataclasses.FrozenInstanceError):
        measurement.samples = 1  # type: ignore[misc]


def test_limits_that_are_impossible_name_the_value_and_the_remedy() -> None:
    assert (Limits(), Limits(0).minimum, Limits(4, 4).maximum) == (Limits(1, None), 0, 4)
    with pytest.raises(ValueError, match=r"minimum must be >= 0, got -1: use 0 or more"):
        Limits(-1)
    with pytest.raises(ValueError, match=r"maximum must be >= minimum = 5, got 4: raise the max"):
        Limits(5, 4)


def test_training_limits_are_one_per_worker() -> None:
    assert training_limits(None, 2) == (Limits(), Limits())
    assert training_limits(Limits(2, 8), 2) == (Limits(2, 8),) * 2
    assert training_limits([Limits(), Limits(3)], 2) == (Limits(), Limits(3))
    with pytest.raises(ValueError, match=r"one for each of the 3 workers, got 2: pass one Limits"):
        training_limits([Limits(), Limits(3)], 3)
    with pytest.raises(ValueError, match=r"Limits\.minimum must be >= 1 while training, got 0"):
        training_limits([Limits(), Limits(0)], 2)
