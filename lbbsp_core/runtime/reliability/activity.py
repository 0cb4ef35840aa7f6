"""What a worker does now: its session and collectives note it, its heartbeat tells the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final


class Activity(IntEnum):
    """What a worker does."""

    STARTING = 0
    COMPUTING = 1
    WAITING = 2
    OUTSIDE = 3
    MEETING = 4
    LEAVING = 5
    TRAINED = 6


_WORDS: Final = {
    Activity.STARTING: "before its first step",
    Activity.COMPUTING: "in step {step}",
    Activity.WAITING: "at the end of step {step}, waiting for the others",
    Activity.OUTSIDE: "between steps, before step {step}",
    Activity.MEETING: "between steps, before step {step}, waiting for the others",
    Activity.TRAINED: "after its training, before the end of its script",
    Activity.LEAVING: "at the end of its script, before step {step}",
}


def describe(activity: int, step: int) -> str:
    """Returns an activity in words, to complete "worker 1 is ..."."""
    return _WORDS[Activity(activity)].format(step=step)


class CurrentActivity:
    """What this process does now; all its sessions and collectives share one, on any thread.

    Noting it is cheap enough for every step.

    Example:
        >>> current = CurrentActivity()
        >>> current.enter(Activity.COMPUTING, 7)
        >>> with current.during(Activity.MEETING):
        ...     current.read()[:2]
        (<Activity.MEETING: 4>, 7)
        >>> current.read()[:2]
        (<Activity.COMPUTING: 1>, 7)
    """

    def __init__(self) -> None:
        self._doing = Activity.STARTING, 0, time.monotonic()  # since then

    def enter(self, activity: Activity, step: int | None = None) -> None:
        """Notes what this worker does from now on; the step defaults to the one noted last."""
        self._doing = activity, self._doing[1] if step is None else step, time.monotonic()

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Notes an activity inside the context, and afterwards what this worker did before.

        What another thread has noted meanwhile is kept.
        """
        before, step, _ = self._doing
        self.enter(activity)
        entered = self._doing
        try:
            yield
        finally:
            if self._doing is entered:
                self.enter(before, step)

    def read(self) -> tuple[Activity, int, int]:
        """Returns the activity, the step, and the whole seconds for which it has lasted."""
        activity, step, since = self._doing
        return activity, step, int(time.monotonic() - since)
