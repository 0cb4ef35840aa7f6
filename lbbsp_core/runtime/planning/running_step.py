"""The step that is running: this worker's measurements, and what the times of all workers say.

What changes busy seconds is here: `StepMeter` leaves out waits, and adds what work sharing corrects
(once, before the message); `RunningStep` says which seconds of those exchanged are learned.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from lbbsp_core.cost import Cost
from lbbsp_core.measure import BusyTimer, OverlapTimer
from lbbsp_core.policy import FirstUses, Observation
from lbbsp_core.resources import ResourceSampler
from lbbsp_core.runtime.exchange.protocol import StepMessage
from lbbsp_core.runtime.record.record import StepLine
from lbbsp_core.runtime.reliability.activity import Activity, CurrentActivity
from lbbsp_core.work import StepShares

logger = logging.getLogger("lbbsp.session")


class Reading(NamedTuple):
    """Measurement of a step, taken when its barrier is reached.

    Args:
        busy_seconds: Busy seconds since the worker left the last barrier.
        drivers: Driving factors sampled then, the exogenous inputs of the *next* step's forecast.
        hidden_seconds: Part of the busy time in which gradients were on their way.
    """

    busy_seconds: float
    drivers: tuple[float, ...]
    hidden_seconds: float = 0.0


class Left(NamedTuple):
    """End of a step, when its barrier is left.

    Args:
        wall_seconds: Seconds since the last barrier was left.
        time: Unix time.
    """

    wall_seconds: float
    time: float


class StepMeter:
    """Times the steps of one worker, samples its resources, and marks steps to exclude.

    Resources are not sampled anew within `sampling_seconds`, less than half of the time over which
    a sample is a mean: reading them takes a part of a short step.

    It also notes in `activity` whether the worker computes or waits. `overlap` times gradients that
    are sent before the last one is computed.

    No predictor learns from an *excluded* step: the first one of a fit or an epoch, and one that
    follows an evaluation, a save or a (re)trace (rule 4).
    """

    sampling_seconds = 0.02

    def __init__(self, activity: CurrentActivity | None = None) -> None:
        self._activity = activity or CurrentActivity()
        self._timer = BusyTimer()
        self.overlap = OverlapTimer()
        self._sampler: ResourceSampler | None = None
        self._drivers: tuple[float, ...] = ()
        self._sampled_at = -math.inf
        self._excluded, self._retraced = True, False
        self._lock = threading.Lock()
        self._waits = 0
        self._timer.start()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sampled resources, in the order of `Reading.drivers`."""
        return self._sampler.names if self._sampler else ()

    def open(self, names: Sequence[str] | None, gpu: int = 0) -> None:
        """Starts sampling the driving factors `names`, unless it is open; None: the default ones.

        On the cores that are in use now, and on the visible GPU of the number `gpu`.
        """
        if self._sampler is None:
            self._sampler = ResourceSampler(names, gpu=gpu)
            self._sampled_at = -math.inf

    def close(self) -> None:
        """Stops sampling; forgets waits that a failed step did not end."""
        with self._lock:
            self._waits = 0
        self.overlap.resume()
        self.overlap.leave()
        if self._sampler is not None:
            self._sampler.close()
            self._sampler, self._drivers = None, ()

    def exclude_step(self, *, retraced: bool = False) -> None:
        """Excludes the running step from learning."""
        self._excluded, self._retraced = True, self._retraced or retraced

    def take_excluded(self) -> bool:
        """Returns whether the running step is excluded, and resets the mark for the next step."""
        excluded, self._excluded = self._excluded, False
        return excluded

    def take_marks(self) -> tuple[bool, bool]:
        """Returns whether the running step is excluded, and traced anew, and resets the marks."""
        retraced, self._retraced = self._retraced, False
        return self.take_excluded(), retraced

    def begin_step(self, step: int) -> None:
        """Restarts the timer if the step is excluded, so that earlier work does not count."""
        self._activity.enter(Activity.COMPUTING, step)
        if self._excluded:
            self._timer.start()
            self.overlap.leave()  # what a failed step has left

    def begin_wait(self) -> None:
        """Starts a wait that does not count as busy time, on any thread; waits may overlap."""
        with self._lock:
            self._waits += 1
            if self._waits == 1:
                self._timer.pause()
                self.overlap.pause()
        self._activity.enter(Activity.WAITING)

    def end_wait(self) -> None:
        """Ends a wait that `begin_wait` has started."""
        self._activity.enter(Activity.COMPUTING)
        with self._lock:
            self._waits -= 1
            if self._waits == 0:
                self._timer.resume()
                self.overlap.resume()

    @contextmanager
    def excluded_wait(self) -> Iterator[None]:
        """Excludes the time spent inside the context from the busy time."""
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    def elapsed(self) -> float:
        """Returns the busy seconds of the running step so far."""
        return self._timer.reach()

    def add_busy(self, seconds: float) -> None:
        """Adds to the busy seconds of the running step, or subtracts from them."""
        self._timer.add(seconds)

    def reach(self) -> Reading:
        """Returns the measurement of the step; call it on reaching the barrier."""
        busy_seconds = self._timer.reach()
        hidden_seconds = self.overlap.reach()
        now = time.monotonic()
        if self._sampler and now - self._sampled_at >= self.sampling_seconds:
            self._drivers, self._sampled_at = self._sampler.sample(), now
        return Reading(busy_seconds, self._drivers, hidden_seconds)

    def leave(self, step: int | None = None) -> Left:
        """Starts the next step, number `step`, to which what follows belongs."""
        self._activity.enter(Activity.COMPUTING, step)
        self.overlap.leave()
        return Left(self._timer.leave(), time.time())


def log_waits(step: int, messages: Sequence[StepMessage], wall_seconds: float) -> None:
    """Logs which worker the others waited for in a step, and how long each of them waited."""
    busy = [message.busy_nanoseconds / 1e9 for message in messages]
    longest = max(busy)
    last = busy.index(longest)
    waits = ", ".join(
        f"worker {rank} {longest - x:.4f} s" for rank, x in enumerate(busy) if rank != last
    )
    text = "step %d took %.4f s; waited for worker %d (busy %.4f s): %s"
    logger.debug(text, step, wall_seconds, last, longest, waits or "no other worker")


class RunningStep(NamedTuple):
    """A step, and what is known of it before it ends.

    Args:
        step: Its global number.
        shares: What the workers do in it.
        costs: Cost by which each worker's batch was planned; None where it was unknown.
        is_short: Whether it has fewer samples than the global batch size. Its plan was scaled
            down, and the overhead has a larger share in it.
        first_uses: What is known of each worker's batches; empty: first uses cost nothing.
        messages: Messages of all workers at the end of the step.
        busy_seconds: Exchanged busy time of each worker.
        next_costs: Costs for the next plan.
        wall_seconds: Time from barrier to barrier.
        drivers: Driving factors of all workers that were known before the step, by name.
    """

    step: int
    shares: StepShares
    costs: Sequence[Cost | None]
    is_short: bool
    first_uses: tuple[FirstUses, ...]
    messages: Sequence[StepMessage] = ()
    busy_seconds: tuple[float, ...] = ()
    next_costs: Sequence[Cost | None] = ()
    wall_seconds: float = 0.0
    drivers: Mapping[str, tuple[float | None, ...]] = {}

    def predicted(self, rank: int) -> float | None:
        """Returns the predicted busy seconds of a worker, unless the step is short."""
        cost = None if self.is_short else self.costs[rank]
        return None if cost is None else float(cost(self.shares.work[rank]))

    def is_new(self, rank: int) -> bool:
        """Returns whether the step may be a costly first use of a worker."""
        return bool(self.first_uses) and self.shares.sizes[rank] not in self.first_uses[rank].sizes

    def measured(self, rank: int, busy_seconds: float) -> float | None:
        """Returns the seconds to learn from; None: it is a first use that says nothing."""
        if not self.is_new(rank):
            return busy_seconds
        size, forecast = self.shares.sizes[rank], self.predicted(rank)
        return self.first_uses[rank].measured(size, busy_seconds, forecast)

    def first_uses_after(self) -> tuple[FirstUses, ...]:
        """Returns what is known of each worker's batches after the step."""
        after = []
        steps = zip(self.first_uses, self.messages, self.busy_seconds, strict=False)
        for rank, (uses, message, busy) in enumerate(steps):
            forecast = self.predicted(rank) if self.is_new(rank) else None
            uses = uses.retraced() if message.retraced else uses
            uses = uses.after(self.shares.sizes[rank], busy, forecast, excluded=message.excluded)
            after.append(uses.ran(self.shares.plan[rank], busy))
        return tuple(after)

    def observation(
        self, first_uses: tuple[FirstUses, ...], *, last_of_epoch: bool, lag: int
    ) -> Observation:
        """Returns what the policy learns; `first_uses` are those after the step."""
        shares, costs, busy = self.shares, self.next_costs, self.busy_seconds
        busy = tuple(
            0.0 if message.retraced else self.measured(rank, busy[rank]) or 0.0
            for rank, message in enumerate(self.messages)
        )
        excluded = tuple(
            rank for rank, message in enumerate(self.messages) if message.excluded or not busy[rank]
        )
        if shares.are_cut_by_work:  # as if the step had had exactly the planned work
            busy = tuple(t * x / w for t, x, w in zip(busy, shares.plan, shares.work, strict=True))
            first_uses = ()
        return Observation(
            self.step, shares.plan, busy, excluded, costs, last_of_epoch, first_uses, lag
        )

    def line(self, ended: float | None = None) -> StepLine:
        """Returns the step's line of the run record; `ended` is the Unix time of its end."""
        work, busy = self.shares.work, self.busy_seconds
        slowest = max(self.messages, key=lambda message: message.busy_nanoseconds)
        return StepLine(
            step=self.step,
            sizes=self.shares.sizes,
            busy_seconds=busy,
            predicted_seconds=tuple(map(self.predicted, range(len(work)))),
            wall_seconds=self.wall_seconds,
            hidden_seconds=slowest.hidden_nanoseconds / 1e9,
            excluded=tuple(  # also where seconds are corrected: they are no speeds
                rank
                for rank, message in enumerate(self.messages)
                if message.excluded or self.measured(rank, busy[rank]) != busy[rank]
            ),
            short=self.is_short,
            drivers=self.drivers,
            work=work if self.shares.are_cut_by_work else (),
            time=ended,
        )
