"""Observers of the steps of a run: the run record, logs, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from lbbsp_core.runtime.record.record import StepLine

Observer = Callable[[StepLine], None]
"""Function that a step is passed to when it has ended. It must not block."""


class Observers:
    """Passes the lines of a `Balancer`, which has no clock, to observers with the time of day."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._observers: list[Observer] = []
        self._ended: float | None = None

    def __bool__(self) -> bool:
        return bool(self._observers)

    def add(self, observer: Observer) -> None:
        """Adds an observer."""
        self._observers.append(observer)

    def end_step(self) -> None:
        """Notes the time at the end of a step, whose line may be written later."""
        self._ended = self._clock()

    def write(self, line: StepLine) -> None:
        """Passes a step to all observers."""
        line = replace(line, time=self._ended)
        for observer in self._observers:
            observer(line)
