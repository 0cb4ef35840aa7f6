"""Short steps: batches that stay near even shares, and several steps that are one measurement."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from lbbsp_core.policy import BatchConstraints, even_plan
from lbbsp_core.validate import require_nonnegative, require_positive

_LARGEST_RATIO = 5.0
_RISE, _FALL = 0.025, 0.1


class ShortStepsState(NamedTuple):
    """What `ShortSteps` has learned.

    Args:
        seconds: Smoothed busy time of each worker, by rank; None before a step was measured.
        steps: Measured steps so far.
        slowest: T, the largest of `seconds` when the last span ended.
        span_seconds: Busy time of the slowest workers in the steps since then.
        last_seconds: That of the last step.
    """

    seconds: tuple[float, ...] | None
    steps: int
    slowest: float | None = None
    span_seconds: float = 0.0
    last_seconds: float = 0.0

    def checked(self, workers: int) -> ShortStepsState:
        """Returns the state if it is one of a job with so many workers."""
        if self.seconds is not None and len(self.seconds) != workers:
            raise ValueError(f"the times of steps must be those of {workers} workers, got {self}")
        slowest = () if self.slowest is None else (self.slowest,)
        for seconds in (*(self.seconds or ()), *slowest):
            require_positive("the time of a step", seconds)
        for seconds in (self.span_seconds, self.last_seconds):
            require_nonnegative("the time of a span", seconds)
        return self


class ShortSteps:
    r"""Keeps batches near the even plan while steps are short, and measures several as one.

    The busy time of a step has a part that does not depend on the batch: Python, the exchange, a
    time slice of another process, 2 to 10 ms altogether. In a step of 10 ms it is most of the
    time. A worker with a small batch then takes as long as one with a large batch, looks slow per
    sample, and gets a smaller batch still: plans drift as far as limits allow, and every
    disturbance moves them. Ours: with T the smoothed time of a step, e_i the even share of worker i
    and D the threshold, each batch stays within

    .. math:: |x_i - e_i| \le e_i T / D

    so that it is wrong by less than a fraction T / D whatever is measured. Steps of at least D are
    not restricted. T is the largest of the workers' smoothed busy times: expectiles 0.2, because
    contention makes short steps longer, but not speeds better known. (Of many workers, some are
    always delayed: the smoothed time of the slowest one would grow with their number.) They grow
    by at most a tenth per step, so that a pause of a process widens no bounds, and start at the
    time of the fastest worker.

    Neither is one such step a good measurement, nor worth the work of a forecast. Workers therefore
    learn from the mean of a *span* of steps, and T and forecasts change at its end: with the step
    after which the span will have taken D, if that takes as long as the last one. Forecasts for
    plans of a lag of 3 then look 3 spans ahead, farther than they need to.

    Decisions are the same on all workers: scalar operations on exchanged integers (rule 3). A
    threshold of 0 never restricts.

    Example:
        >>> from lbbsp_core import Limits
        >>> short = ShortSteps(0.05)
        >>> constraints = BatchConstraints(256, (Limits(),) * 2)
        >>> short.observe((0.010, 0.010), ())
        >>> [(limits.minimum, limits.maximum) for limits in short.narrow(constraints).limits]
        [(103, 153), (103, 153)]
    """

    def __init__(self, threshold_seconds: float) -> None:
        self.threshold_seconds = require_nonnegative("short_step_seconds", threshold_seconds)
        self.state = ShortStepsState(None, 0)  # to continue from; the same on all workers

    @property
    def seconds(self) -> float | None:
        """T, the smoothed busy time of the slowest worker; None before the first measurement."""
        if self.state.slowest is None and self.state.seconds:  # no span has ended yet
            return max(self.state.seconds)
        return self.state.slowest

    @property
    def steps(self) -> int:
        """Measured steps so far."""
        return self.state.steps

    @property
    def fraction(self) -> float:
        """T / D, by which a batch may differ from its even share; 1 or more: by any number."""
        seconds = self.seconds
        if seconds is None or seconds >= self.threshold_seconds:
            return 1.0
        return seconds / self.threshold_seconds

    @property
    def ends_span(self) -> bool:
        """Whether a span ends with the running step."""
        seconds = self.state.span_seconds + self.state.last_seconds
        return self.state.seconds is None or seconds >= self.threshold_seconds

    def observe(self, busy_seconds: Sequence[float], excluded: Collection[int]) -> None:
        """Adds the running step: to T, which changes with spans, if a worker was measured in it.

        Busy seconds of 0 are invalid measurements.
        """
        measured = {
            rank: busy for rank, busy in enumerate(busy_seconds) if busy and rank not in excluded
        }
        smoothed = list(
            self.state.seconds or [min(measured.values(), default=0.0)] * len(busy_seconds)
        )
        for rank, busy in measured.items():
            before = smoothed[rank]
            change = min(busy, _LARGEST_RATIO * before) - before
            smoothed[rank] = before + (_RISE if change > 0 else _FALL) * change
        last, ends_span = max(busy_seconds), self.ends_span
        self.state = ShortStepsState(
            tuple(smoothed) if all(smoothed) else None,
            self.state.steps + bool(measured),
            max(smoothed) or None if ends_span else self.state.slowest,
            0.0 if ends_span else self.state.span_seconds + last,
            last,
        )

    def narrow(self, constraints: BatchConstraints) -> BatchConstraints:
        """Returns the constraints for the next plan; the even plan always satisfies them."""
        fraction = self.fraction
        if fraction >= 1:
            return constraints
        limits = []
        for even, bounds in zip(even_plan(constraints), constraints.limits, strict=True):
            change = int(even * fraction)
            lowest, highest = max(even - change, bounds.minimum), even + change
            if bounds.maximum is not None:
                highest = min(highest, bounds.maximum)
            limits.append(replace(bounds, minimum=lowest, maximum=highest))
        return replace(constraints, limits=tuple(limits))
