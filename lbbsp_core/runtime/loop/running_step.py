"""The step that is running: what its workers do, and what their busy times say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lbbsp_core.cost import Cost
from lbbsp_core.policy import FirstUses, Observation
from lbbsp_core.runtime.exchange.protocol import StepMessage
from lbbsp_core.runtime.record.figures import even_seconds
from lbbsp_core.runtime.record.record import StepLine
from lbbsp_core.work import StepShares


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
        found = []
        steps = zip(self.first_uses, self.messages, self.busy_seconds, strict=False)
        for rank, (known, message, busy) in enumerate(steps):
            forecast = self.predicted(rank) if self.is_new(rank) else None
            known = known.retraced() if message.retraced else known
            known = known.after(self.shares.sizes[rank], busy, forecast, excluded=message.excluded)
            found.append(known.ran(self.shares.plan[rank], busy))
        return tuple(found)

    def observation(self, known: tuple[FirstUses, ...], *, last_of_epoch: bool) -> Observation:
        """Returns what the policy learns; `known` are the first uses after the step."""
        shares, costs, busy = self.shares, self.next_costs, self.busy_seconds
        measured = list(map(self.measured, range(len(busy)), busy))
        excluded = tuple(
            rank
            for rank, message in enumerate(self.messages)
            if message.excluded or measured[rank] is None
        )
        busy = tuple(t if s is None else s for t, s in zip(busy, measured, strict=True))
        if shares.are_cut_by_work:  # as if the step had had exactly the planned work
            busy = tuple(t * x / w for t, x, w in zip(busy, shares.plan, shares.work, strict=True))
            known = ()
        return Observation(self.step, shares.plan, busy, excluded, costs, last_of_epoch, known)

    def line(self) -> StepLine:
        """Returns the step's line of the run record."""
        work, busy = self.shares.work, self.busy_seconds
        return StepLine(
            step=self.step,
            sizes=self.shares.sizes,
            busy_seconds=busy,
            predicted_seconds=tuple(map(self.predicted, range(len(work)))),
            wall_seconds=self.wall_seconds,
            even_seconds=even_seconds(work, busy, self.next_costs),
            excluded=tuple(  # also where seconds are corrected: they are no speeds
                rank
                for rank, message in enumerate(self.messages)
                if message.excluded or self.measured(rank, busy[rank]) != busy[rank]
            ),
            short=self.is_short,
            drivers=self.drivers,
            work=work if self.shares.are_cut_by_work else (),
        )
