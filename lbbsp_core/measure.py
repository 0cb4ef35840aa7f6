"""First stage of the loop: times busy seconds and rejects outliers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lbbsp_core.types import Measurement
from lbbsp_core.validate import require_positive


class BusyTimer:
    """Measures the busy time of a worker: from leaving one barrier to reaching the next (rule 4).

    In a synchronous step the wall time is the same on all workers; LB-BSP equalises the time
    that each worker is busy between two barriers. It includes input wait, Python and the
    optimizer, and excludes waiting for peers. Call `pause` and `resume` around a collective
    inside the step (synchronised batch normalisation).

    Args:
        clock: Returns monotonic nanoseconds. Tests pass a fake clock.

    Example:
        >>> ticks = iter([0, 7_000_000, 10_000_000, 15_000_000])
        >>> timer = BusyTimer(clock=lambda: next(ticks))
        >>> timer.start()          # no barrier before the first step
        >>> timer.reach()          # 7 ms busy, then the barrier
        0.007
        >>> timer.leave()          # released 10 ms after the start: waited for 3 ms
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
        """Restarts the measurement now and discards the time since the last barrier."""
        self._left_ns, self._waited_ns = self._clock(), 0

    def pause(self) -> None:
        """Stops counting busy time: a collective inside the step starts."""
        self._paused_at_ns = self._clock()

    def resume(self) -> None:
        """Continues counting busy time: the collective inside the step has ended."""
        # A barrier may have been left meanwhile, by an operation that runs beside the wait.
        self._waited_ns += self._clock() - max(self._paused_at_ns, self._left_ns)

    def reach(self) -> float:
        """Returns busy seconds since the last barrier; call it on reaching the next one."""
        return (self._clock() - self._left_ns - self._waited_ns) / 1e9

    def leave(self) -> float:
        """Starts the next step and returns wall seconds since the last barrier was left."""
        now = self._clock()
        wall_ns, self._left_ns, self._waited_ns = now - self._left_ns, now, 0
        return wall_ns / 1e9


class OverlapTimer:
    """Measures how long parts of a gradient travel while their worker still computes others.

    The parts of a step are sent while the backward pass yields the others; it ends when the worker
    reaches the barrier. Time in which several of them are on the way counts once. Any thread may
    call `begin` and `end`.

    Args:
        clock: Returns monotonic nanoseconds. Tests pass a fake clock.

    Example:
        >>> ticks = iter([0, 3_000_000, 5_000_000, 9_000_000])
        >>> timer = OverlapTimer(clock=lambda: next(ticks))
        >>> timer.begin(); timer.end()   # a part travels for 3 ms
        >>> timer.begin(); timer.reach() # another one for 4 ms before the barrier
        0.007
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way, self._waits = 0, False
        self._counted_ns = self._sum_ns = 0

    def begin(self) -> None:
        """Starts to count: a part is computed, and sent."""
        with self._lock:
            self._count()
            self._under_way += 1

    def end(self) -> None:
        """Stops counting, if no other part is on its way: the sum of a part has arrived."""
        with self._lock:
            self._count()
            self._under_way = max(self._under_way - 1, 0)  # 0: it belongs to a step that was left

    def pause(self) -> None:
        """Stops counting: the worker waits for a collective inside the step."""
        with self._lock:
            self._count()
            self._waits = True

    def resume(self) -> None:
        """Continues to count: the worker computes again."""
        with self._lock:
            self._count()
            self._waits = False

    def reach(self) -> float:
        """Returns the seconds so far of a step that reaches its barrier."""
        with self._lock:
            self._count()
            return self._sum_ns / 1e9

    def leave(self) -> None:
        """Starts the next step: all sums have arrived."""
        with self._lock:
            self._under_way = self._sum_ns = 0

    def _count(self) -> None:
        """Adds the time since the last call, if a part was on its way, and the worker computed."""
        now = self._clock()
        if self._under_way and not self._waits:
            self._sum_ns += now - self._counted_ns
        self._counted_ns = now


class OutlierFilterState(NamedTuple):
    """State of an `OutlierFilter`.

    Args:
        speed: Last accepted speed, in samples per second; None before the first one.
        outliers: Number of consecutive outliers since then.
    """

    speed: float | None = None
    outliers: int = 0


@dataclass(frozen=True, slots=True)
class OutlierFilter:
    """Rejects invalid and outlying measurements before they reach a predictor (rule 7).

    NaN, infinite, zero and negative values are always rejected. A measurement whose speed
    differs from the last accepted one by more than `factor` is an outlier (a pause of the
    process, a clock step). It is rejected unless it is the `patience`-th in a row, which is
    accepted as the new level.

    Args:
        factor: Ratio of speeds, > 1, beyond which a measurement is an outlier. Contention
            changes speeds by a factor of 2 to 4 within one step, and must be accepted.
        patience: Number of consecutive outliers that make a new level, >= 1.

    Raises:
        ValueError: `factor` or `patience` is out of range.

    Example:
        >>> outlier_filter = OutlierFilter(factor=5.0, patience=2)
        >>> state, first = outlier_filter.accept(outlier_filter.init(), Measurement(10, 1.0))
        >>> state, pause = outlier_filter.accept(state, Measurement(10, 60.0))
        >>> state, second_pause = outlier_filter.accept(state, Measurement(10, 60.0))
        >>> first, pause, second_pause
        (True, False, True)
    """

    factor: float = 5.0
    patience: int = 3

    def __post_init__(self) -> None:
        require_positive("OutlierFilter.factor - 1", self.factor - 1)
        require_positive("OutlierFilter.patience", self.patience)

    def init(self) -> OutlierFilterState:
        """Returns the state before the first measurement."""
        return OutlierFilterState()

    def accept(
        self, state: OutlierFilterState, measurement: Measurement
    ) -> tuple[OutlierFilterState, bool]:
        """Returns the next state, and whether `measurement` is accepted."""
        if not measurement.is_valid:
            return state, False
        speed = float(measurement.samples_per_second)
        is_usual = state.speed is None or 1 / self.factor <= speed / state.speed <= self.factor
        if is_usual or state.outliers + 1 >= self.patience:
            return OutlierFilterState(speed), True
        return OutlierFilterState(state.speed, state.outliers + 1), False
