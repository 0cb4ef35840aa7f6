"""Contract of a predictor: a frozen dataclass of hyper-parameters and an explicit state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from lbbsp_core.types import Measurement, Real, State


@runtime_checkable
class Predictor(Protocol[State]):
    """Forecasts one worker's speed from its past: pure functions over an explicit state.

    A predictor that learns slowly may have a further method, see `trained`.

    `update` never changes the state it is given, so a predictor can be pickled, replayed and
    printed. All three methods run in every training step and must be cheap.

    Checked by `lbbsp_core.testing.check_predictor`.
    """

    def init(self) -> State:
        """Returns the state before the first measurement."""
        ...

    def update(self, state: State, measurement: Measurement) -> State:
        """Learns from one iteration.

        Args:
            state: From `init` or `update`; left unchanged.
            measurement: Effective samples, busy seconds and drivers of the iteration.

        Returns:
            The next state.
        """
        ...

    def predict(self, state: State, drivers: tuple[float, ...] = (), horizon: int = 1) -> Real:
        """Forecasts the speed `horizon` iterations ahead.

        Args:
            state: From `init` or `update`.
            drivers: Driving factors known now, before the next iteration starts; in the order of
                `Measurement.drivers`.
            horizon: Number of iterations ahead, >= 1; 1 is the next iteration.

        Returns:
            Samples per second, finite and at least 1e-6; NaN before the first measurement.
            Others count as no forecast.
        """
        ...


def trained(predictor: Predictor[State], state: State) -> State:
    """Returns the state after the predictor's ``train(state)``, if it has such a method.

    There a predictor may do what the next forecast need not wait for. It is called while a worker
    waits for the others; without a call the next `update` must do the same.
    """
    train: Callable[[State], State] | None = getattr(predictor, "train", None)
    return state if train is None else train(state)
