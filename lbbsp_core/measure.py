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

    def add(self, seconds: float) -> None:
        """Adds to the busy time of the running step, or subtracts from it."""
        self._waited_ns -= round(seconds * 1e9)

    def reach(self) -> float:
        """Returns busy seconds since the last barrier; call it on reaching the next one."""
        return (self._clock() - self._left_ns - self._waited_ns) / 1e9

    def leave(self) -> float:
        """Starts the next step and returns wall seconds since the last barrier was left."""
        now = self._clock()
        wall_ns, self._left_ns, self._waited_ns = now - self._left_ns, now, 0
        return wall_ns / 1e9


class PartTimer:
    """Times the main part of a step, and the parts that its worker claims after it.

    Args:
        main: Samples of the main part.
        elapsed: Returns the busy seconds of the running step.

    Attributes:
        samples: Samples that the worker has computed, or is computing.
        parts: Number of parts that it has claimed.
        seconds: Busy seconds until the last claim was answered.
        waits: Seconds of each claim.

    Example:
        >>> ticks = iter([0.3, 0.31, 0.41, 0.42])
        >>> timer = PartTimer(30, lambda: next(ticks))
        >>> timer.claim(lambda seconds: (0, 8)), timer.claim(lambda seconds: (20, 20))
        ((0, 8), (20, 20))
        >>> timer.samples, timer.parts, round(timer.seconds_of(40, 0.0, part_overhead=2.0), 3)
        (38, 1, 0.4)
    """

    def __init__(self, main: int, elapsed: Callable[[], float]) -> None:
        self.samples, self.parts, self.elapsed = main, 0, elapsed
        self.seconds = 0.0
        self.waits: list[float] = []
        self._main, self._main_seconds = main, 0.0
        self._times: list[tuple[int, float]] = []  # samples and seconds of the parts
        self._begun = 0  # samples of the part that is being computed

    def claim(self, ask: Callable[[float], tuple[int, int]] | None) -> tuple[int, int]:
        """Claims a part, when all work before it is done.

        Args:
            ask: Called with the busy seconds so far; returns positions of the first sample and
                after the last. None: nothing is left.

        Returns:
            What it returns; equal positions if nothing is left.
        """
        busy_seconds = self.elapsed()
        if self._begun:
            self._times.append((self._begun, busy_seconds - self.seconds))
        else:
            self._main_seconds = busy_seconds
        begin, end = ask(busy_seconds) if ask else (0, 0)
        self.seconds = self.elapsed() if ask else busy_seconds
        self.waits += [self.seconds - busy_seconds] if ask else []
        self._begun = end - begin
        self.samples += self._begun
        self.parts += self._begun > 0
        return begin, end

    def drop(self) -> None:
        """Forgets the part that was claimed last, which is not computed."""
        self.samples -= self._begun
        self.parts -= self._begun > 0
        self._begun = 0

    def seconds_of(self, samples: float, step_overhead: float, part_overhead: float) -> float:
        """Returns the busy seconds of a batch of some samples at the pace of this step.

        Overheads are in samples.
        """
        work = step_overhead + self.samples + self.parts * part_overhead
        return (step_overhead + samples) * (self.seconds - sum(self.waits)) / work

    def paced(self, step_overhead: float) -> list[tuple[int, float, float]]:
        """Returns samples and seconds of each part, and seconds a sample of the main part."""
        pace = self._main_seconds / (step_overhead + self._main)
        return [(samples, seconds, pace) for samples, seconds in self._times]

    def mean_wait(self, mean: float, memory: int = 10) -> float:
        """Returns the running mean of claims, of which each counts as ten times the mean at most.

        `mean` is that before the step.
        """
        for wait in self.waits:
            mean += (min(wait, 10 * mean) - mean) / memory
        return mean


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
