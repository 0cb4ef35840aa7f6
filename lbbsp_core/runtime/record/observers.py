"""Observers of the steps of a run: the run record, logs, metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lbbsp_core.runtime.record.record import StepLine

Observer = Callable[[StepLine], None]
"""Function that a step is passed to when it has ended. It must not block."""


class Observers:
    """Passes the lines of a `Balancer` on when all that belongs to them is known."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._line: StepLine | None = None

    def __bool__(self) -> bool:
        return bool(self._observers)

    def add(self, observer: Observer) -> None:
        """Passes each step that follows to `observer`, with the values of all workers."""
        self._observers.append(observer)

    def write(self, line: StepLine) -> None:
        """Takes a step from the balancer, which has no clock."""
        self._line = line

    def end_step(self, extend: Callable[[StepLine], StepLine], ended: float) -> None:
        """Passes the step that was written on, with what `extend` adds and the time of its end."""
        if self._line is not None:
            line, self._line = replace(extend(self._line), time=ended), None
            for observer in self._observers:
                observer(line)
