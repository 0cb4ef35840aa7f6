"""Run record of a session, written by worker 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from lbbsp_core.runtime.exchange.protocol import StepMessage
from lbbsp_core.runtime.extensions.base import Extra, StepExtension
from lbbsp_core.runtime.record.events import PLANNED, EventLine
from lbbsp_core.runtime.record.record import RunHeader, StepLine
from lbbsp_core.runtime.record.writer import RunRecord, open_record


class Recording(StepExtension):
    """Opens the run record in the first training, if one is wanted."""

    _record: RunRecord | None = None
    _planned: tuple[int | None, int | None] = None, None

    def started(self, header: Callable[[], RunHeader]) -> None:
        """Opens the record."""
        path = self.session.options.record_path()
        if path is not None and self.session.rank == 0 and self._record is None:
            self._record = open_record(path, header())
            self.session.observers.append(self._record.write)

    def plan(self, *, epochs: int | None = None, steps: int | None = None) -> None:
        """Records when the training that begins will end: after epochs of the order, or steps."""
        self._planned = epochs, steps

    def received(self, line: StepLine, extra: Extra, messages: Sequence[StepMessage]) -> StepLine:
        """Records the plan before the first step of a training, when the order is known."""
        (epochs, steps), self._planned = self._planned, (None, None)
        ends = [] if steps is None else [line.step + steps]
        if epochs is not None:
            with suppress(LookupError):  # the samples of steps are not known
                ends.append(self.session.balancer.schedule.epoch_end_step(line.step, epochs))
        if ends and self._record is not None:
            self._record.write(EventLine(event=PLANNED, steps=min(ends), time=time.time()))
        return line
