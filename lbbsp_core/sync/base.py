"""The contract of a synchroniser: pushes in; model updates and released workers out."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

from lbbsp_core.types import State

T = TypeVar("T")


class SyncDecision(NamedTuple):
    """What happens now: which pushes enter the model, and which workers proceed.

    A worker whose push is answered by a decision that does not release it waits; a later
    decision releases it. A push that is not aggregated is kept until a decision aggregates it.

    Args:
        aggregate: Workers whose kept pushes enter the model now, together as *one* update, in
            the order of ranks. Empty: the model does not change.
        release: Workers that start their next iteration now, from the model after the update,
            in the order of ranks.
    """

    aggregate: tuple[int, ...] = ()
    release: tuple[int, ...] = ()


@runtime_checkable
class Synchroniser(Protocol[State]):
    """Decides which workers wait: frozen options, an explicit state, no clock, no thread.

    The type parameter State is the type of the state. All methods are pure: they return the next
    state and leave the given one unchanged. Times are seconds of any monotonic clock; calls come
    in the order of time.

    `lbbsp_core.testing.check_synchroniser` checks this contract.
    """

    keeps_pushes: ClassVar[bool]
    """Whether some pushes are kept and enter the model together, as one update.

    If not, every push enters the model on arrival: `push` aggregates that worker and no other.
    """

    def init(self, workers: int, now: float = 0.0) -> State:
        """Returns the first state, in which all workers are released.

        Args:
            workers: Number of workers, N >= 1.
            now: Time at which they start, in seconds.

        Raises:
            ValueError: `workers` is not an integer >= 1.
        """

    def push(self, state: State, worker: int, now: float) -> tuple[State, SyncDecision]:
        """Decides about the gradient of one iteration that `worker` has pushed.

        Args:
            state: Last state.
            worker: Rank of the worker.
            now: Time of the push, in seconds.

        Returns:
            The next state and the decision.

        Raises:
            ValueError: The worker waits, or is not active.
        """

    def finish(self, state: State, worker: int, now: float) -> tuple[State, SyncDecision]:
        """Decides what follows from `worker` leaving, because it has finished or failed.

        No worker waits for it any more. Its kept pushes still enter the model, together with
        those of the others.

        Args:
            state: Last state.
            worker: Rank of the worker.
            now: Time, in seconds.

        Returns:
            The next state and the decision.

        Raises:
            ValueError: The worker is not active.
        """

    def join(self, state: State, worker: int, now: float) -> tuple[State, SyncDecision]:
        """Adds a worker: one that has left before, or a new one with the next rank.

        It is released at once and counts as being where the slowest worker is. A push that was
        kept from before it left is dropped.

        Args:
            state: Last state.
            worker: Rank of the worker.
            now: Time, in seconds.

        Returns:
            The next state and the decision.

        Raises:
            ValueError: The worker is active, or its rank is not the next one.
        """


def ends_together(synchroniser: Synchroniser) -> bool:
    """Returns whether all workers end every iteration together: then it has an end and a mean."""
    return bool(getattr(synchroniser, "ends_together", False))


def replaced(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """Returns a copy with `item` at `index`, which may be the next one."""
    return (*items[:index], item, *items[index + 1 :])


def require_time(now: float) -> float:
    """Returns `now` if it is finite."""
    if not math.isfinite(now):
        raise ValueError(f"now must be finite, got {now!r}: pass the seconds of a monotonic clock")
    return now


def require_active(worker: int, active: bool, known: int) -> None:
    """Raises an error unless `worker` runs or waits."""
    if not active:
        raise ValueError(
            f"worker {worker} is not active (ranks 0 to {known - 1} are known, and some workers "
            "may have left): let it join first"
        )


def require_running(worker: int, running: bool) -> None:
    """Raises an error if `worker` waits."""
    if not running:
        raise ValueError(
            f"worker {worker} pushed while it waits: a worker pushes once for each time that a "
            "decision releases it"
        )


def require_inactive(worker: int, active: bool, known: int) -> None:
    """Raises an error if `worker` cannot join."""
    if active or not 0 <= worker <= known:
        raise ValueError(
            f"worker {worker} cannot join: it must have left before, or have the next rank, {known}"
        )
