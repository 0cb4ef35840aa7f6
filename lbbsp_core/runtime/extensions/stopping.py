"""Requests to stop: a worker's wish, or its preemption, after which all leave in the same step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

from lbbsp_core.runtime.checkpoint.checkpoint import Json
from lbbsp_core.runtime.exchange.protocol import StepMessage
from lbbsp_core.runtime.extensions.base import Extra, StepExtension
from lbbsp_core.runtime.record.record import PREEMPTED, REQUESTED, StepLine

_STOP, _PREEMPTED = 1, 2


class Stopping(StepExtension):
    """Exchanges requests, so that all workers know of them after the same step."""

    width = 1

    requested = False
    """Request of this worker to stop that has not been exchanged yet."""

    preemption_requested = False
    """Request of this worker to leave."""

    stopping = preempted = False
    """Requests of any worker, true on all workers after the same step."""

    def request(self) -> None:
        """Asks all workers to stop after the next exchange."""
        self.requested = True

    def request_preemption(self) -> None:
        """Announces that this worker must leave; may be called by any thread."""
        self.preemption_requested = True

    def offer(self) -> Sequence[int]:
        """Returns the flags of this worker."""
        return (_STOP * self.requested + _PREEMPTED * self.preemption_requested,)

    def received(self, line: StepLine, extra: Extra, messages: Sequence[StepMessage]) -> StepLine:
        """Takes the flags of all, and records why all workers stop."""
        self.take(flags for (flags,) in extra)
        if not (self.stopping or self.preempted):
            return line
        return replace(line, stop=PREEMPTED if self.preempted else REQUESTED)

    def take(self, flags: Iterable[int]) -> None:
        """Takes the flags of all workers."""
        every = reduce(or_, flags)
        self.stopping, self.preempted = bool(every & _STOP), bool(every & _PREEMPTED)
        if self.stopping:
            self.requested = False  # has been exchanged

    def restore(self, state: Json) -> None:
        """Forgets why the training stopped that is continued."""
        self.stopping = self.preempted = False

    def close(self) -> None:
        """Drops requests to stop, which are of the training that ends."""
        self.requested = self.stopping = False
