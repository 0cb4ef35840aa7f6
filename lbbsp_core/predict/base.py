"""The contract of a predictor."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from lbbsp_core.types import Measurement


@runtime_checkable
class Predictor(Protocol):
    """Forecasts one worker's speed: frozen hyper-parameters, explicit state, pure functions.

    `update` never changes the state it is given, so a predictor pickles, replays and prints.
    All three are cheap: they run in every training step.
    """

    def init(self) -> Any:
        """The state before anything was measured."""
        ...

    def update(self, state: Any, measurement: Measurement) -> Any:
        """Learns from one iteration and returns the next state."""
        ...

    def predict(self, state: Any, drivers: tuple[float, ...] = (), horizon: int = 1) -> Any:
        """Forecasts the speed `horizon` iterations ahead.

        Args:
            state: From `init` or `update`.
            drivers: Driving factors known now, before the iteration starts.
            horizon: Iterations ahead, >= 1; 1 is the next one.

        Returns:
            Samples per second, > 0; NaN as long as nothing was measured.
        """
        ...
