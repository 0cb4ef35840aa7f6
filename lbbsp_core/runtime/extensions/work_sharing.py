"""Work sharing inside a step, see `lbbsp_core.reserve`: what parts cost, and which steps share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from lbbsp_core.measure import PartTimer
from lbbsp_core.reserve import (
    AUTO,
    CLAIM_SECONDS,
    SLOW_CLAIM_SECONDS,
    Claims,
    Hindsight,
    HindsightState,
    Pace,
    PartCosts,
    Seen,
)
from lbbsp_core.runtime.checkpoint.checkpoint import Json
from lbbsp_core.runtime.exchange.handshake import Facts
from lbbsp_core.runtime.exchange.protocol import LIMB, DisagreementError, StepMessage, pack, unpack
from lbbsp_core.runtime.extensions.base import Extra, Session, StepExtension
from lbbsp_core.runtime.record.record import RunHeader, StepLine

logger = logging.getLogger("lbbsp.session")

_FAILED: Final = 128  # in the same integer as a fraction in percent
_THOUSANDTHS: Final = 1000
_MILLION: Final = 1_000_000


class WorkSharing(StepExtension):
    """Chooses the fraction of each step that is shared, the same on all workers.

    Where `mode` is not 0 the plugin sets `allowed` in the first step of a training, and calls
    `begin` in each step, for the claims of this worker.

    Attributes:
        mode: Fraction of all steps in percent; `AUTO` chooses it for each step.
        allowed: Whether steps of this training may have a reserve; None: it is not known yet.
    """

    width = 7

    mode: int | str = 0
    allowed: bool | None = None

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._hindsight, self._state = Hindsight(), HindsightState()
        self._costs, self._claim_seconds = PartCosts(), CLAIM_SECONDS
        self._pace = Pace(0.0)  # of this worker, of the plan, in the last step
        self._overheads: tuple[float, ...] = ()  # of parts by rank, as they were exchanged last
        self._sizes: Sequence[int] = ()  # plan of the running step
        self._claims: StepClaims | None = None
        self._steps, self._parts = [0, 0], 0  # of this training: those without and with a reserve

    def facts(self) -> Facts:
        """Returns how work is shared."""
        return {"share_work": str(self.mode)}

    def started(self, header: Callable[[], RunHeader]) -> None:
        """Begins a training, whose first steps have no reserve."""
        self.allowed = None
        self.session.balancer.schedule.reserves.clear()

    @property
    def _is_on(self) -> bool:
        """Whether this step, or a later one, may have a reserve."""
        return bool(self.mode) and (self.allowed is not False or self._claims is not None)

    @property
    def _fraction(self) -> int:
        return self._state.percent if self.mode == AUTO else int(self.mode)

    @property
    def _part_overhead(self) -> float:
        """Overhead of this worker's parts in samples."""
        return self._costs.overhead(self._pace.seconds_per_sample)

    def begin(self) -> StepClaims | None:
        """Begins the running step; returns this worker's claims if the step has a reserve."""
        balancer = self.session.balancer
        self._sizes = sizes = balancer.sizes(balancer.step)
        split = balancer.schedule.split(balancer.step)
        self._claims = None
        if split.reserve:
            rank, grain = self.session.rank, balancer.constraints.granularity
            expected = self._state.step_seconds or self._pace.main(sizes[rank])
            claims = Claims(
                *(sizes, split.mains, rank, expected or 1.0),
                *(self._claim_seconds, self._part_overhead, grain),
            )
            self._claims = StepClaims(split.mains[rank], claims, self.session.meter.elapsed)
        return self._claims

    def offer(self) -> Sequence[int]:
        """Returns what this worker has computed of the step that ends, and what parts cost.

        The worker's message then says how long it would have been busy with its planned batch.
        """
        if not self._is_on:
            return (0,) * self.width
        claims, fails = self._claims, False
        computed = (0, 0, 0, 0)
        if claims is not None:
            fails = any(wait > SLOW_CLAIM_SECONDS for wait in claims.waits)
            self._claim_seconds = claims.mean_wait(self._claim_seconds)
            planned, overhead = self._sizes[self.session.rank], self._pace.step_overhead
            seconds = claims.seconds_of(planned, overhead, self._part_overhead)
            self.session.meter.add_busy(seconds - claims.seconds)
            high, low = pack([round(claims.seconds * 1e9)])
            computed = claims.samples, claims.parts, int(high), int(low)
        balancer = self.session.balancer
        flags = balancer.schedule.reserves.get(balancer.step, 0) + _FAILED * fails
        costs = self._part_overhead * _THOUSANDTHS, self._claim_seconds * _MILLION
        return flags, *computed, *(min(round(cost), LIMB - 1) for cost in costs)

    def received(self, line: StepLine, extra: Extra, messages: Sequence[StepMessage]) -> StepLine:
        """Learns what sharing would have brought in a step; chooses the fraction of a later one.

        Records what each worker has computed, in how many parts, and how long it was busy.
        """
        if not self._is_on:
            return line
        percents = [flags % _FAILED for flags, *_ in extra]
        if len({*percents}) > 1:
            raise DisagreementError(
                f"at step {line.step} the workers share {percents} % of the step, by rank: run the "
                "same lbbsp and Python on all workers"
            )
        self._fail_if(any(flags >= _FAILED for flags, *_ in extra))
        self._overheads = tuple(row[5] / _THOUSANDTHS for row in extra)
        busy = tuple(unpack(row[3:5])[0] / 1e9 for row in extra)
        self._steps[percents[0] > 0] += 1
        balancer = self.session.balancer
        if not any(message.excluded or not message.busy_nanoseconds for message in messages):
            paces = [*map(_pace, messages, self._sizes, self._overheads)]
            self._learn_parts(paces[self.session.rank])
            if self.mode == AUTO:
                claim = sum(row[6] for row in extra) / (len(extra) * _MILLION)
                hidden = max(message.hidden_nanoseconds for message in messages) / 1e9
                grain, step = balancer.constraints.granularity, Seen(percents[0], max(busy), hidden)
                self._state = self._hindsight.update(
                    self._state, self._sizes, paces, claim, grain, step
                )
        self._claims = None
        schedule = balancer.schedule
        schedule.reserves[line.step + schedule.lag] = self._fraction if self.allowed else 0
        if not percents[0]:
            return line
        parts = tuple(row[2] for row in extra)
        self._parts += sum(parts)
        return replace(
            line,
            sizes=tuple(row[1] for row in extra),
            busy_seconds=busy,
            predicted_seconds=(None,) * len(extra),  # of the plan
            values={**line.values, "parts": tuple(map(float, parts))},
        )

    def _learn_parts(self, pace: Pace) -> None:
        self._pace = pace
        if (claims := self._claims) is not None:
            for part in claims.paced(pace.step_overhead):
                self._costs = self._costs.after(*part)

    def _fail_if(self, failed: bool) -> None:
        if failed and self.allowed and self.session.rank == 0:
            logger.warning(
                "a claim of samples has taken more than %g s: steps do not share work any more",
                SLOW_CLAIM_SECONDS,
            )
        if failed:
            self.allowed = False

    def summary(self) -> str:
        """Returns how much work was shared, and what it has cost."""
        if not self._steps[1]:
            return ""
        overhead = self._part_overhead * self._pace.seconds_per_sample
        return (
            f"{self._steps[1]} of {sum(self._steps)} steps shared work, in "
            f"{self._parts / self._steps[1]:.1f} parts, with an overhead of {1e3 * overhead:.1f} ms"
            f" a part, and {1e3 * self._claim_seconds:.1f} ms a claim"
        )

    def close(self) -> None:
        """Forgets what the summary was made of."""
        self._steps, self._parts = [0, 0], 0

    def state(self) -> Json:
        """Returns what hindsight knows, and the overheads of parts by rank."""
        return [[*self._state[:1], [*self._state.costs], *self._state[2:]], [*self._overheads]]

    def restore(self, state: Any) -> None:
        """Continues from a state; overheads fit the same number of workers only."""
        if state:
            (percent, costs, *rest), overheads = state
            self._state = HindsightState(percent, tuple(costs), *rest)
            if len(overheads) == self.session.workers:
                self._overheads = tuple(overheads)
                self._costs = PartCosts(overheads[self.session.rank], weight=1)


class StepClaims(PartTimer):
    """Claims of one worker in a running step, and their times.

    Args:
        main: Samples of its main part.
        claims: Chooses the sizes of claims.
        elapsed: Returns the busy seconds of the running step so far.
    """

    def __init__(self, main: int, claims: Claims, elapsed: Callable[[], float]) -> None:
        super().__init__(main, elapsed)
        self._claims = claims

    def take(self, add: Callable[[int], int]) -> tuple[int, int]:
        """Claims a part of the reserve; call it when all work before is done.

        Args:
            add: Adds a number of samples to the counter of the step, and returns its value before.

        Returns:
            Positions in the reserve, of the first sample and after the last; equal if none is left.
        """

        def ask(seconds: float) -> tuple[int, int]:
            size = self._claims.next_size(seconds)
            return self._claims.take(add(size), size, self.elapsed())

        return self.claim(None if self._claims.is_empty else ask)


def _pace(message: StepMessage, size: int, part_overhead: float) -> Pace:
    """Returns the pace of a worker in a step that would have computed its planned batch."""
    overhead = 1e3 * message.overhead_nanoseconds / max(message.picoseconds_per_sample, 1)
    return Pace(message.busy_nanoseconds / 1e9 / (overhead + size), overhead, part_overhead)
