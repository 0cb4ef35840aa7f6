"""ElasticBSP: barriers at the times when the workers are predicted to be closest together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from lbbsp_core.sync.base import (
    SyncDecision,
    replaced,
    require_active,
    require_inactive,
    require_running,
    require_time,
)
from lbbsp_core.sync.zipline import zipline
from lbbsp_core.validate import require_integer


class Runner(NamedTuple):
    """State of one worker under ElasticBSP.

    Args:
        remaining: Iterations to push until it waits for the barrier; 0: it waits, and its last
            push is kept; -1: it has departed, and no push is kept.
        active: Whether it has not departed.
        pushes: Number of measured intervals, at most `ElasticBSP.warmup`.
        released: Start of its iteration, in seconds.
        interval: Time from its last release to its push, in seconds.
    """

    remaining: int = 1
    active: bool = True
    pushes: int = 0
    released: float = 0.0
    interval: float = 0.0


class ElasticState(NamedTuple):
    """State of `ElasticBSP`.

    Args:
        runners: State of each worker.
    """

    runners: tuple[Runner, ...]


@dataclass(frozen=True, slots=True)
class ElasticBSP:
    r"""ElasticBSP (Zhao et al., arXiv 2001.01347): barriers placed where they cost little waiting.

    Paper: (1) observe at least two pushes of each worker; its interval I_p is the difference of
    the last two. (2) Predict R pushes of each worker, ``e[p, i] = last_p + i I_p``. (3) `zipline`
    picks one push of each worker, as close together as possible. (4) Until the barrier worker p
    runs to its chosen push, and each push before that enters the model on arrival; at the barrier
    all wait, and the chosen pushes enter as one update, as in BSP. Repeat from (1).

    Ours: an interval runs from release to push, since a difference of pushes across a barrier
    would include the wait; predictions start at the barrier, i = 1, ..., R; and the warm-up,
    until all workers have been observed (also after a join), is BSP, so that R = 1 is BSP
    throughout. A worker runs the chosen number of iterations, however long they take.

    Args:
        lookahead: R, maximum iterations of a worker between two barriers, an integer >= 1.
        warmup: Pushes of each worker before the first prediction, an integer >= 1.

    Raises:
        ValueError: An option is not an integer >= 1.

    Example:
        >>> elastic = ElasticBSP(lookahead=4, warmup=1)  # worker 0 needs 1 s, worker 1 needs 3 s
        >>> state, decisions = elastic.init(2), []
        >>> for worker, now in (0, 1.0), (1, 3.0), (0, 4.0), (0, 5.0), (1, 6.0), (0, 6.0):
        ...     state, decision = elastic.push(state, worker, now)
        ...     decisions.append((decision.aggregate, decision.release))
        >>> decisions[:2], decisions[2:4]
        ([((), ()), ((0, 1), (0, 1))], [((0,), (0,)), ((0,), (0,))])
        >>> decisions[4:]
        [((), ()), ((0, 1), (0, 1))]

    References:
        Zhao, Papagelis, An, Chen, Liu, Hu: Elastic Bulk Synchronous Parallel Model for
        Distributed Deep Learning, ICDM 2019, arXiv 2001.01347.
    """

    keeps_pushes: ClassVar[bool] = True

    lookahead: int = 15
    warmup: int = 2

    def __post_init__(self) -> None:
        require_integer("ElasticBSP.lookahead", self.lookahead, 1)
        require_integer("ElasticBSP.warmup", self.warmup, 1)

    def init(self, workers: int, now: float = 0.0) -> ElasticState:
        """Releases all workers, for one iteration."""
        first = Runner(released=require_time(now))
        return ElasticState((first,) * require_integer("workers", workers, 1))

    def push(
        self, state: ElasticState, worker: int, now: float
    ) -> tuple[ElasticState, SyncDecision]:
        """Applies the push, or keeps it at the barrier, which the last worker completes."""
        runner = _active(state, worker)
        require_running(worker, runner.remaining > 0)
        runner = runner._replace(
            remaining=runner.remaining - 1,
            pushes=min(runner.pushes + 1, self.warmup),
            released=require_time(now),
            interval=max(now - runner.released, 0.0),
        )
        runners = replaced(state.runners, worker, runner)
        if runner.remaining:
            return ElasticState(runners), SyncDecision((worker,), (worker,))
        return self._complete(runners, now)

    def finish(
        self, state: ElasticState, worker: int, now: float
    ) -> tuple[ElasticState, SyncDecision]:
        """Removes the worker; completes the barrier if only this worker was missing."""
        runner = _active(state, worker)
        departed = runner._replace(active=False, remaining=-1 if runner.remaining else 0)
        return self._complete(replaced(state.runners, worker, departed), now)

    def join(
        self, state: ElasticState, worker: int, now: float
    ) -> tuple[ElasticState, SyncDecision]:
        """Adds the worker with one iteration until the barrier, and observes it from now on."""
        workers = len(state.runners)
        require_inactive(worker, 0 <= worker < workers and state.runners[worker].active, workers)
        runners = replaced(state.runners, worker, Runner(released=require_time(now)))
        return ElasticState(runners), SyncDecision(release=(worker,))

    def _complete(
        self, runners: tuple[Runner, ...], now: float
    ) -> tuple[ElasticState, SyncDecision]:
        """Completes the barrier if no worker is missing: aggregates, predicts and releases."""
        active = [rank for rank, runner in enumerate(runners) if runner.active]
        if not active or any(runners[rank].remaining for rank in active):
            return ElasticState(runners), SyncDecision()
        kept = tuple(rank for rank, runner in enumerate(runners) if not runner.remaining)
        quotas = self._quotas([runners[rank] for rank in active], now)
        remaining = dict(zip(active, quotas, strict=True))
        after = tuple(
            runner._replace(remaining=remaining.get(rank, -1), released=now)
            for rank, runner in enumerate(runners)
        )
        return ElasticState(after), SyncDecision(kept, tuple(active))

    def _quotas(self, runners: list[Runner], now: float) -> list[int]:
        """Returns the iterations of each worker until the next barrier, shape ``(workers,)``."""
        if any(runner.pushes < self.warmup for runner in runners):
            return [1] * len(runners)
        intervals = np.array([runner.interval for runner in runners])
        predicted = now + intervals[:, None] * np.arange(1, self.lookahead + 1)
        quotas: list[int] = (zipline(predicted).indices + 1).tolist()
        return quotas


def _active(state: ElasticState, worker: int) -> Runner:
    workers = len(state.runners)
    runner = state.runners[worker] if 0 <= worker < workers else Runner(active=False)
    require_active(worker, runner.active, workers)
    return runner
