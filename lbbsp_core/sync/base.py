"""The contract of a synchroniser: pushes in; what enters the model and who goes on, out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable


class SyncDecision(NamedTuple):
    """What is to be done now.

    A worker whose push is answered by a decision that does not release it waits; a later
    decision releases it. A push that is not aggregated is kept, until one aggregates it.

    Args:
        aggregate: Workers whose kept pushes enter the model now, together as *one* update; by
            rank. Empty: the model stays as it is.
        release: Workers that begin their next iteration now, from the model as it is after the
            update; by rank.
    """

    aggregate: tuple[int, ...] = ()
    release: tuple[int, ...] = ()


@runtime_checkable
class Synchroniser(Protocol):
    """Decides who waits for whom: frozen options, an explicit state, no clock, no thread.

    All methods are pure: they return the next state and leave the one they are given. Times are
    seconds of any clock that never goes back; calls come in its order.

    Raises:
        ValueError: From `push`, `finish` and `join`: an event that cannot be, such as the push
            of a worker that waits or has left.
    """

    def init(self, workers: int, now: float = 0.0) -> Any:
        """The state at the start: `workers` workers, all of them released at time `now`."""
        ...

    def push(self, state: Any, worker: int, now: float) -> tuple[Any, SyncDecision]:
        """The next state, once `worker` has pushed the gradient of one iteration."""
        ...

    def finish(self, state: Any, worker: int, now: float) -> tuple[Any, SyncDecision]:
        """The next state, once `worker` has left: it is done, or dead. Nobody waits for it.

        What it has pushed still enters the model where the others' pushes do.
        """
        ...

    def join(self, state: Any, worker: int, now: float) -> tuple[Any, SyncDecision]:
        """The next state, once `worker` has come (back): a former one, or the next number.

        It is released at once, and counts as being where the slowest worker is. A push kept
        from before it left is dropped.
        """
        ...


def require_time(now: float) -> float:
    """Returns `now` if it is finite, else raises ValueError."""
    if not math.isfinite(now):
        raise ValueError(f"now must be finite, got {now!r}: pass the seconds of a steady clock")
    return now


def require_present(worker: int, present: bool, known: int) -> None:
    """Raises ValueError if `worker` is not one that runs or waits."""
    if not present:
        raise ValueError(
            f"worker {worker} is not there (of the numbers 0 to {known - 1}, some may have left): "
            "let it join first"
        )


def require_running(worker: int, running: bool) -> None:
    """Raises ValueError if `worker` waits."""
    if not running:
        raise ValueError(
            f"worker {worker} pushed while it waits: a worker pushes once for each time that a "
            "decision releases it"
        )


def require_absent(worker: int, present: bool, known: int) -> None:
    """Raises ValueError if `worker` cannot join."""
    if present or not 0 <= worker <= known:
        raise ValueError(
            f"worker {worker} cannot join: it must have left before, or be the next number, {known}"
        )
