"""`check_predictor` on the simple predictors, their closed forms, and broken predictors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from lbbsp_core import Ema, LastValue, Measurement, Predictor
from lbbsp_core.testing import check_predictor

PREDICTORS: list[Predictor] = [LastValue(), Ema(), Ema(0.2), Ema(1.0)]


@pytest.mark.parametrize("drivers", [0, 2])
@pytest.mark.parametrize("predictor", PREDICTORS, ids=repr)
def test_contract(predictor: Predictor, drivers: int) -> None:
    assert isinstance(predictor, Predictor)
    check_predictor(predictor, drivers=drivers, arrays=True)


def predicted(predictor: Predictor, speeds: Sequence[float]) -> list[Any]:
    """Returns the prediction after each of `speeds`."""
    state, predictions = predictor.init(), []
    for speed in speeds:
        state = predictor.update(state, Measurement(speed, 1.0))
        predictions.append(predictor.predict(state))
    return predictions


def test_last_value_is_the_last_value() -> None:
    assert predicted(LastValue(), [3.0, 900.0, 5.0]) == [3.0, 900.0, 5.0]


def test_ema_closed_form() -> None:
    assert predicted(Ema(0.25), [8.0, 16.0, 16.0]) == [8.0, 10.0, 11.5]
    assert Ema() == Ema(0.5)


@pytest.mark.parametrize("alpha", [0.0, -0.5, 1.0001, math.nan, math.inf])
def test_ema_weight_out_of_range(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"Ema\.alpha must be in \(0, 1\], got"):
        Ema(alpha)


# Predictors that break the contract in one way each


@dataclass(frozen=True)
class Broken:
    """Predicts the last speed; each subclass breaks one rule of the contract."""

    window: int = 3

    def init(self) -> Any:
        return ()

    def update(self, state: Any, measurement: Measurement) -> Any:
        return (measurement.samples_per_second,)

    def predict(self, state: Any, drivers: tuple[float, ...] = (), horizon: int = 1) -> Any:
        return state[-1] if state else math.nan


class Greedy(Broken):
    def update(self, state: Any, measurement: Measurement) -> Any:
        return (*state, measurement.samples_per_second)


class InPlace(Broken):
    def init(self) -> Any:
        return []

    def update(self, state: Any, measurement: Measurement) -> Any:
        state[:] = [measurement.samples_per_second]
        return state


class Eager(Broken):
    def predict(self, state: Any, drivers: tuple[float, ...] = (), horizon: int = 1) -> Any:
        return state[-1] if state else 1.0


class Extrapolating(Broken):
    def update(self, state: Any, measurement: Measurement) -> Any:
        return (*state[-1:], measurement.samples_per_second)

    def predict(self, state: Any, drivers: tuple[float, ...] = (), horizon: int = 1) -> Any:
        return state[-1] + horizon * (state[-1] - state[0]) if state else math.nan


class OneStepOnly(Broken):
    def predict(self, state: Any, drivers: tuple[float, ...] = (), horizon: int = 1) -> Any:
        return math.inf if horizon > 1 and state else super().predict(state)


class Learning(Broken):
    def init(self) -> Any:
        return [math.nan]

    def update(self, state: Any, measurement: Measurement) -> Any:
        return [measurement.samples_per_second]

    def predict(self, state: Any, drivers: tuple[float, ...] = (), horizon: int = 1) -> Any:
        state[0] *= 0.999
        return state[0]


@dataclass(frozen=True)
class Shared(Broken):
    """Keeps memory outside the state."""

    memory: list[float] = field(default_factory=list, compare=False, hash=False, repr=False)

    def update(self, state: Any, measurement: Measurement) -> Any:
        self.memory[:] = [*self.memory[-2:], measurement.samples_per_second]
        return (sum(self.memory) / len(self.memory),)

    def __repr__(self) -> str:
        return f"Shared(window={self.window}, memory={self.memory})"


@dataclass
class Mutable:
    window: int = 3


@dataclass(frozen=True)
class Silent(Broken):
    def __repr__(self) -> str:
        return "Silent()"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Greedy(), "must stay bounded"),
        (InPlace(), "update changed the state"),
        (Eager(), "must predict NaN before the first update, got 1.0"),
        (Extrapolating(), "must predict a finite float > 0, got -"),
        (OneStepOnly(), "got inf after 1 updates at horizon 2"),
        (Learning(), "predict changed the state"),
        (Shared(), "a call changed"),
        (Mutable(), "must be a frozen dataclass"),
        (Silent(), "repr must show window=3"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_contract_finds_what_is_broken(broken: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_predictor(broken, updates=400)


class Mixing(Broken):
    def update(self, state: Any, measurement: Measurement) -> Any:
        speed = measurement.samples_per_second
        return (speed if isinstance(speed, float) else speed[::-1],)


def test_the_contract_finds_broken_arrays() -> None:
    check_predictor(Mixing(), updates=100)
    with pytest.raises(AssertionError, match="must treat arrays elementwise"):
        check_predictor(Mixing(), updates=100, arrays=True)
