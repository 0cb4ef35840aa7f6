"""Measure: seconds a worker is busy alone, and which of them to believe."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lbbsp_core.types import Measurement
from lbbsp_core.validate import require_positive


class BusyTimer:
    """Times a worker *alone*: from leaving one barrier to reaching the next.

    In a synchronous step the wall time is the same on every worker; what differs, and what must
    be equalised, is the time each is busy between two barriers. Input wait, Python and the
    optimizer belong to it; waiting for peers does not. A collective inside the step
    (synchronised batch normalisation) is bracketed by `pause` and `resume`.

    Args:
        clock: Nanoseconds, monotonic. Tests pass a fake.

    Example:
        >>> ticks = iter([0, 7_000_000, 10_000_000, 15_000_000])
        >>> timer = BusyTimer(clock=lambda: next(ticks))
        >>> timer.start()          # nothing known before: count from here
        >>> timer.reach()          # 7 ms busy, then the barrier
        0.007
        >>> timer.leave()          # 10 ms from start to release: 3 ms were spent waiting
        0.01
        >>> timer.reach()
        0.005
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._left_ns = 0
        self._paused_at_ns = 0
        self._waited_ns = 0

    def start(self) -> None:
        """Counts from now: there was no barrier, or what happened since does not count."""
        self._left_ns, self._waited_ns = self._clock(), 0

    def pause(self) -> None:
        """A collective inside the step begins."""
        self._paused_at_ns = self._clock()

    def resume(self) -> None:
        """The collective inside the step has ended."""
        self._waited_ns += self._clock() - self._paused_at_ns

    def reach(self) -> float:
        """The barrier is reached. Returns busy seconds since the last one was left."""
        return (self._clock() - self._left_ns - self._waited_ns) / 1e9

    def leave(self) -> float:
        """The barrier opens. Returns wall seconds since the last one was left."""
        now = self._clock()
        wall_ns, self._left_ns, self._waited_ns = now - self._left_ns, now, 0
        return wall_ns / 1e9


class OutlierFilterState(NamedTuple):
    """State of an `OutlierFilter`: the last accepted speed (None at first), outliers in a row."""

    speed: float | None = None
    outliers: int = 0


@dataclass(frozen=True, slots=True)
class OutlierFilter:
    """Keeps bad measurements from a predictor (rule 7).

    NaN, infinite, zero and negative ones never pass. One whose speed differs from the last
    good one by more than `factor` is an outlier (a pause, a clock step) and is held, unless
    it is the `patience`-th in a row: then it is the new level.

    Args:
        factor: Ratio of speeds, > 1, beyond which a measurement is an outlier. Contention
            changes speeds by 2 to 4 within a step, and must pass.
        patience: Outliers in a row that make a new level, >= 1.

    Example:
        >>> gate = OutlierFilter(factor=5.0, patience=2)
        >>> state, accepted = gate.accept(gate.init(), Measurement(10, 1.0))
        >>> state, admitted_pause = gate.accept(state, Measurement(10, 60.0))
        >>> state, admitted_again = gate.accept(state, Measurement(10, 60.0))
        >>> accepted, admitted_pause, admitted_again
        (True, False, True)
    """

    factor: float = 5.0
    patience: int = 3

    def __post_init__(self) -> None:
        require_positive("Gate.factor - 1", self.factor - 1)
        require_positive("Gate.patience", self.patience)

    def init(self) -> OutlierFilterState:
        """Nothing seen yet."""
        return OutlierFilterState()

    def accept(
        self, state: OutlierFilterState, measurement: Measurement
    ) -> tuple[OutlierFilterState, bool]:
        """Returns the next state, and whether a predictor may learn from `measurement`."""
        if not measurement.is_valid:
            return state, False
        speed = float(measurement.samples_per_second)
        if state.speed is None or 1 / self.factor <= speed / state.speed <= self.factor:
            return OutlierFilterState(speed), True
        if state.outliers + 1 >= self.patience:
            return OutlierFilterState(speed), True
        return OutlierFilterState(state.speed, state.outliers + 1), False
