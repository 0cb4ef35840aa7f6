"""Contract of synchronisers, checked in virtual time."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from lbbsp_core.sim.events import Change, EventLoop, schedule
from lbbsp_core.sync import SyncDecision, Synchroniser
from lbbsp_core.testing._contract import check_flags, check_value, copied, pickled, unchanged

Decided = tuple[Any, SyncDecision]
"""A state, and what was decided."""


def check_synchroniser(
    synchroniser: Synchroniser, *, max_lead: float = math.inf, pushes: int = 200
) -> None:
    """Checks the contract of `Synchroniser`, in virtual time.

    The synchroniser must be a frozen value that compares, hashes, pickles and prints its
    parameters; no call may change it or a state; the same events must give the same decisions,
    also from a pickled state; a worker must run whenever one is active (no deadlock), also when
    workers leave and join; every push must enter the model once, before its worker proceeds; no
    worker may start an iteration too far ahead; impossible events must be refused. `keeps_pushes`
    must be True if and only if some push does not enter the model on arrival.

    Args:
        synchroniser: Synchroniser to check.
        max_lead: Maximum lead over the slowest worker at the start of an iteration, in
            iterations since the last barrier (an update from the gradients of all workers).
        pushes: Pushes for each cluster, of 1 to 7 workers.

    Raises:
        AssertionError: The contract is broken; names the rule and the decision.

    Example:
        >>> from lbbsp_core import SSP
        >>> check_synchroniser(SSP(3), max_lead=3)
    """
    check_value(synchroniser)
    check_flags(synchroniser, "keeps_pushes")
    kept = 0
    for seed in range(8):
        source, workers = random.Random(seed), (1, 2, 3, 7)[seed % 4]
        monitor = _Monitor(synchroniser, max_lead)
        changes = _changes(source, workers) if seed >= 2 else ()
        loop = EventLoop(monitor, _noisy_seconds(source), workers)
        deque(islice(loop.run(changes), pushes), maxlen=0)
        monitor.check_replay()
        kept += monitor.kept_pushes
        _check_all_enter(synchroniser, _noisy_seconds(source), workers)
    assert kept > 0 or not synchroniser.keeps_pushes, (
        f"{synchroniser!r} aggregates every push on arrival: keeps_pushes must be False"
    )
    _check_refusals(synchroniser)


class _Monitor:
    """A synchroniser that passes all events on to another one and checks its decisions."""

    keeps_pushes: ClassVar[bool] = True

    def __init__(self, inner: Synchroniser, max_lead: float) -> None:
        self._inner, self._max_lead = inner, max_lead
        self._pickled = pickled(inner)
        self._counts: dict[int, int] = {}  # pushes of each active worker since the last barrier
        self._running: set[int] = set()
        self._kept: set[int] = set()  # workers with a push that has not entered the model
        self._calls: list[tuple[str, Any, int, float, Decided]] = []
        self.kept_pushes = 0

    def init(self, workers: int, now: float = 0.0) -> Any:
        self._counts = dict.fromkeys(range(workers), 0)
        self._running = set(self._counts)
        return self._inner.init(workers, now)

    def push(self, state: Any, worker: int, now: float) -> Decided:
        self._running.remove(worker)
        self._kept.add(worker)
        self._counts[worker] += 1
        after, decision = self._call("push", state, worker, now)
        assert self._inner.keeps_pushes or decision.aggregate == (worker,), (
            f"the push of worker {worker} was answered by {decision!r}: keeps_pushes must be True"
        )
        self.kept_pushes += worker not in decision.aggregate
        return after, decision

    def finish(self, state: Any, worker: int, now: float) -> Decided:
        self._running.discard(worker)
        del self._counts[worker]
        return self._call("finish", state, worker, now)

    def join(self, state: Any, worker: int, now: float) -> Decided:
        self._kept.discard(worker)
        self._counts[worker] = min(self._counts.values(), default=0)
        return self._call("join", state, worker, now)

    def _call(self, name: str, state: Any, worker: int, now: float) -> Decided:
        transition = partial(getattr(self._inner, name), state, worker, now)
        after, decision = unchanged(name, state, transition)
        self._calls.append((name, state, worker, now, (after, decision)))
        self._check(f"after {name} of worker {worker}, {decision!r}", decision)
        return after, decision

    def _check(self, shown: str, decision: SyncDecision) -> None:
        aggregate, release = set(decision.aggregate), set(decision.release)
        for ranks in decision:
            is_ordered = isinstance(ranks, tuple) and list(ranks) == sorted(set(ranks))
            assert is_ordered, f"{shown} must hold tuples of different ranks in order"
        assert aggregate <= self._kept, f"{shown} must aggregate kept pushes {self._kept} only"
        self._kept -= aggregate
        if aggregate >= self._counts.keys():
            self._counts = dict.fromkeys(self._counts, 0)
        waiting = self._counts.keys() - self._running
        assert release <= waiting, f"{shown} must release waiting workers {waiting} only"
        assert not release & self._kept, f"{shown} must not release workers with kept pushes"
        self._running |= release
        for worker in release:
            lead = self._counts[worker] - min(self._counts.values())
            assert lead <= self._max_lead, (
                f"{shown} must keep leads within {self._max_lead}, got {lead} for worker {worker}"
            )
        assert bool(self._running) or not self._counts, f"{shown} leaves all workers waiting"

    def check_replay(self) -> None:
        """Checks that a copy decides the same from the middle of the run on."""
        assert pickled(self._inner) == self._pickled, f"a call changed {self._inner!r}"
        calls = self._calls[len(self._calls) // 2 :]
        twin, state = copied((self._inner, calls[0][1]))
        for name, _, worker, now, expected in calls:
            again = getattr(twin, name)(state, worker, now)
            assert again == expected, (
                f"{self._inner!r} must decide the same from the same events, got {again[1]!r} "
                f"after {expected[1]!r} at {name} of worker {worker} of a replay"
            )
            state = again[0]


def _noisy_seconds(source: random.Random) -> Callable[[int, int], float]:
    """Returns busy times of unequal workers with outliers; in half of the runs many are equal."""
    equal = source.random() < 0.5
    means = [source.choice((1.0, 1.0, 2.0, 3.5)) for _ in range(32)]

    def seconds(worker: int, iteration: int) -> float:
        noise = source.choice((1.0, 1.0, 2.0)) if equal else source.uniform(0.8, 1.3)
        return means[worker % 32] * noise * (10.0 if source.random() < 0.02 else 1.0)

    return seconds


def _changes(source: random.Random, workers: int) -> Iterator[Change]:
    """Yields workers that leave, sometimes until none is active, and join, some of them new."""
    active, time, next_worker = set(range(workers)), 0.0, workers
    for _ in range(40):
        time += source.choice((0.0, 0.5, 3.0))
        if active and source.random() < 0.5:
            worker = source.choice(sorted(active))
            active.remove(worker)
            yield Change(time, worker)
        else:
            worker = source.choice(sorted(set(range(next_worker + 1)) - active))
            active.add(worker)
            next_worker = max(next_worker, worker + 1)
            yield Change(time, worker, joins=True)


def _check_all_enter(
    synchroniser: Synchroniser, seconds: Callable[[int, int], float], workers: int
) -> None:
    """Checks that no push is lost of workers that leave after their last iteration."""
    run = schedule(synchroniser, seconds, workers=workers, iterations=15)
    assert len(run.update) == 15 * workers, f"{synchroniser!r} must let all workers finish"
    lost = int((run.update < 0).sum())
    assert not lost, (
        f"{synchroniser!r} must aggregate every push, but {lost} of them never entered the model"
    )


def _check_refusals(synchroniser: Synchroniser) -> None:
    start = synchroniser.init(2)
    departed, _ = synchroniser.finish(start, 1, 1.0)
    state, decision = start, SyncDecision(release=(0,))
    for push in range(50):  # until worker 0 waits for worker 1, if it ever does
        if 0 in decision.release:
            state, decision = synchroniser.push(state, 0, 1.0 + push)
    cases = [("push", start, 2), ("push", start, -1), ("push", departed, 1)]
    cases += [("finish", departed, 1), ("finish", start, 2), ("join", start, 1), ("join", start, 3)]
    if 0 not in decision.release:
        cases.append(("push", state, 0))
    for name, before, worker in cases:
        try:
            getattr(synchroniser, name)(before, worker, 100.0)
        except ValueError:
            continue
        raise AssertionError(f"{synchroniser!r} must refuse to {name} worker {worker} in {before}")
