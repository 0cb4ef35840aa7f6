"""Restarts of a job that has failed: whether, with which workers, and after which pause.

A restart begins again with a new cluster, after every process of the failed attempt has ended. The
order of samples does not depend on the number of workers, so that fewer workers, too, can continue
from a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final, NamedTuple

from lbbsp_core.launch.supervise import TIMED_OUT, Outcome
from lbbsp_core.processes.child import Event, Signalled, next_event
from lbbsp_core.validate import require_integer

QUICK_SECONDS: Final = 30.0
"""Duration of an attempt that has failed at once: no training step is likely within it."""

MAX_PAUSE_SECONDS: Final = 60.0


class RestartLimits(NamedTuple):
    """Limits of the restarts of a job: their number, and that of the workers that may remain."""

    restarts: int = 0
    elastic: int | None = None  # None restarts all workers


class Attempt(NamedTuple):
    """One run of the job's processes."""

    members: tuple[int, ...]  # numbers of its workers in the first attempt, by rank
    number: int = 0  # of restarts before this attempt
    quick_failures: int = 0  # attempts just before this one that have failed at once

    @property
    def pause_seconds(self) -> float:
        """Seconds to wait before this attempt, so that a broken job does not occupy the machine."""
        most = min(self.quick_failures, 99)  # larger powers are no floats
        return min(2.0**most // 2, MAX_PAUSE_SECONDS)  # 0, 1, 2, 4, ...


def run_attempts(
    run: Callable[[Attempt], Outcome],
    workers: int,
    limits: RestartLimits,
    events: SimpleQueue[Event],
    signals: Sequence[int],
    notify: Callable[[str], None],
) -> int:
    """Runs attempts until one succeeds, no restart is left, or a signal has arrived.

    All processes of an attempt have ended when `run` returns; events that it leaves are dropped.
    Returns the exit status of the last attempt, or 128 + the signal.
    """
    attempt = Attempt(tuple(range(workers)))
    while True:
        started = time.monotonic()
        outcome = run(attempt)
        if outcome.message is not None:
            notify(outcome.message)
        if signals and outcome.status != 0:  # also a signal that came while the attempt was ended
            return outcome.status if outcome.signalled else 128 + signals[0]
        following, message = next_attempt(attempt, outcome, limits, time.monotonic() - started)
        if message is not None:
            notify(message)
        if following is None:
            return outcome.status
        until = time.monotonic() + following.pause_seconds
        while (event := next_event(events, until)) and not isinstance(event, Signalled):
            pass  # of the attempt that has ended
        if signals:
            return 128 + signals[0]
        attempt = following


def check_limits(limits: RestartLimits, workers: int) -> None:
    """Raises ValueError if the limits are impossible; names the remedy."""
    restarts, elastic = limits
    require_integer("max_restarts", restarts, 0)
    if elastic is None:
        return
    if elastic != int(elastic) or not 1 <= elastic <= workers:
        raise ValueError(
            f"elastic must be an integer from 1 to the number of workers = {workers}, got "
            f"{elastic!r}: give the number of workers with which the job may continue at least"
        )
    if not restarts:
        raise ValueError(
            f"elastic = {elastic} needs restarts: give max_restarts >= 1 as well, or omit elastic"
        )


def next_attempt(
    attempt: Attempt, outcome: Outcome, limits: RestartLimits, seconds: float
) -> tuple[Attempt | None, str | None]:
    """Decides what follows an attempt: the next one, or None; and a message about it, or None."""
    if outcome.status in (0, TIMED_OUT) or outcome.signalled or not limits.restarts:
        return None, None
    if attempt.number >= limits.restarts:
        return None, (
            f"attempt {attempt.number + 1} of {limits.restarts + 1} has failed, and no restart is "
            "left: fix the cause named above, or raise --max-restarts; the job continues from its "
            "last checkpoint, if it writes any"
        )
    lost = outcome.lost_workers if limits.elastic is not None else ()
    members = tuple(member for rank, member in enumerate(attempt.members) if rank not in lost)
    if limits.elastic is not None and len(members) < limits.elastic:
        return None, (
            f"not restarted: without {_names(attempt, lost)}, {_count(len(members))} would remain, "
            f"and --elastic requires {limits.elastic}: fix the cause named above, lower --elastic, "
            "or omit it to restart all workers"
        )
    quick = attempt.quick_failures + 1 if seconds < QUICK_SECONDS else 0
    following = Attempt(members, attempt.number + 1, quick)
    without = f", without {_names(attempt, lost)}" if lost else ""
    pause = f" in {following.pause_seconds:g} s" if following.pause_seconds else ""
    return following, (
        f"restart {following.number} of {limits.restarts} with {_count(len(members))}{without}"
        f"{pause}"
    )


def _names(attempt: Attempt, ranks: Sequence[int]) -> str:
    """Returns the names of workers, with their first numbers where the ranks have changed."""
    firsts = [(rank, attempt.members[rank]) for rank in ranks]
    return " and ".join(
        f"worker {rank}" + (f" (worker {first} of the first attempt)" if first != rank else "")
        for rank, first in firsts
    )


def _count(workers: int) -> str:
    return f"{workers} worker" + ("s" if workers != 1 else "")
