"""ElasticBSP: barriers where the workers are predicted to be closest together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lbbsp_core.sync.base import (
    SyncDecision,
    require_absent,
    require_present,
    require_running,
    require_time,
)
from lbbsp_core.sync.persistent_vector import PersistentVector
from lbbsp_core.sync.zipline import zipline
from lbbsp_core.validate import require_integer


class Runner(NamedTuple):
    """What ElasticBSP knows of one worker.

    Args:
        left: Iterations it has to push until it waits for the barrier; 0: it waits, its last
            push is kept; -1: it has left, and nothing is kept.
        there: Whether it has not left.
        pushes: How many of its intervals were measured, as far as that matters.
        released: When it began its iteration, in seconds.
        interval: Seconds from its last release to its push.
    """

    left: int = 1
    there: bool = True
    pushes: int = 0
    released: float = 0.0
    interval: float = 0.0


class ElasticState(NamedTuple):
    """Where everybody is between two barriers, and how many are still on their way."""

    runners: PersistentVector[Runner]
    missing: int


@dataclass(frozen=True, slots=True)
class ElasticBSP:
    r"""ElasticBSP (Zhao et al., arXiv 2001.01347): a barrier that all can meet without much wait.

    Paper: (1) watch at least two pushes of each worker; its interval I_p is the difference of
    the last two. (2) Predict R pushes of each, ``e[p, i] = last_p + i I_p``. (3) `zipline` picks
    one of each worker, as close together as possible. (4) Until the barrier worker p runs to its
    chosen push, and each push before that enters the model on arrival; at the barrier all wait,
    and the chosen pushes enter as in BSP, as one update. Then again from (1).

    Ours: an interval runs from release to push, since a difference of pushes across a barrier
    would hold the wait; predictions start at the barrier, i = 1, ..., R; and the warm-up, while
    not everyone has been watched (also after a join), is BSP, so that R = 1 is BSP throughout. A
    worker is held to the number of iterations that was chosen for it, not to the predicted time.

    Args:
        lookahead: R, iterations of the fastest worker between two barriers at most, >= 1.
        warmup: Pushes of each worker before the first prediction, >= 1.

    Raises:
        ValueError: Not such numbers.

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
    """

    lookahead: int = 15
    warmup: int = 2

    def __post_init__(self) -> None:
        require_integer("ElasticBSP.lookahead", self.lookahead, 1)
        require_integer("ElasticBSP.warmup", self.warmup, 1)

    def init(self, workers: int, now: float = 0.0) -> ElasticState:
        """All released, for one iteration."""
        first = Runner(released=require_time(now))
        return ElasticState(
            PersistentVector.of((first,) * require_integer("workers", workers, 1)), workers
        )

    def push(
        self, state: ElasticState, worker: int, now: float
    ) -> tuple[ElasticState, SyncDecision]:
        """Applies the push and goes on, or keeps it and waits; the last one makes the barrier."""
        runner = _present(state, worker)
        require_running(worker, runner.left > 0)
        runner = runner._replace(
            left=runner.left - 1,
            pushes=min(runner.pushes + 1, self.warmup),
            released=require_time(now),
            interval=max(now - runner.released, 0.0),
        )
        runners = state.runners.replaced(worker, runner)
        if runner.left:
            return ElasticState(runners, state.missing), SyncDecision((worker,), (worker,))
        return self._arrived(ElasticState(runners, state.missing - 1), now)

    def finish(
        self, state: ElasticState, worker: int, now: float
    ) -> tuple[ElasticState, SyncDecision]:
        """The barrier, if only this worker was missing."""
        runner = _present(state, worker)
        gone = runner._replace(there=False, left=0 if not runner.left else -1)
        runners = state.runners.replaced(worker, gone)
        if not runner.left:
            return ElasticState(runners, state.missing), SyncDecision()
        return self._arrived(ElasticState(runners, state.missing - 1), now)

    def join(
        self, state: ElasticState, worker: int, now: float
    ) -> tuple[ElasticState, SyncDecision]:
        """It has one iteration until the barrier, and is watched from now on."""
        known = len(state.runners)
        require_absent(worker, 0 <= worker < known and state.runners[worker].there, known)
        runners = state.runners.appended(Runner()) if worker == known else state.runners
        runners = runners.replaced(worker, Runner(released=require_time(now)))
        return ElasticState(runners, state.missing + 1), SyncDecision(release=(worker,))

    def _arrived(self, state: ElasticState, now: float) -> tuple[ElasticState, SyncDecision]:
        """One fewer is missing: if it was the last, the barrier is here."""
        if state.missing:
            return state, SyncDecision()
        runners = list(state.runners)
        there = [rank for rank, runner in enumerate(runners) if runner.there]
        if not there:
            return state, SyncDecision()
        kept = tuple(rank for rank, runner in enumerate(runners) if not runner.left)
        runners = [runner if runner.there else runner._replace(left=-1) for runner in runners]
        quotas = self._quotas([runners[rank] for rank in there], now)
        for rank, left in zip(there, quotas, strict=True):
            runners[rank] = runners[rank]._replace(left=left, released=now)
        return ElasticState(PersistentVector.of(runners), len(there)), SyncDecision(
            kept, tuple(there)
        )

    def _quotas(self, runners: list[Runner], now: float) -> list[int]:
        """Iterations of each worker until the next barrier."""
        if any(runner.pushes < self.warmup for runner in runners):
            return [1] * len(runners)
        intervals = np.array([runner.interval for runner in runners])
        predicted = now + intervals[:, None] * np.arange(1, self.lookahead + 1)
        quotas: list[int] = (zipline(predicted).indices + 1).tolist()
        return quotas


def _present(state: ElasticState, worker: int) -> Runner:
    known = len(state.runners)
    runner = state.runners[worker] if 0 <= worker < known else Runner(there=False)
    require_present(worker, runner.there, known)
    return runner
