"""Event loop in virtual time, on runs that can be computed by hand."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbbsp_core import ASP, BSP, DSSP, SSP, ElasticBSP, SyncDecision, Synchroniser
from lbbsp_core.sim import Change, schedule
from lbbsp_core.sim.events import EventLoop, Iteration


def test_an_asynchronous_run_by_hand() -> None:
    """Worker 0 pushes at 2, 4, 6, worker 1 at 3, 7: five updates."""
    run = list(EventLoop(ASP(), [[2.0, 2.0, 2.0], [3.0, 4.0, 9.0]]).run())
    assert run[:5] == [
        Iteration(0, 0, 0.0, 2.0, 2.0, version=0, staleness=0, update=0),
        Iteration(1, 0, 0.0, 3.0, 3.0, version=0, staleness=1, update=1),
        Iteration(0, 1, 2.0, 4.0, 4.0, version=1, staleness=1, update=2),
        Iteration(0, 2, 4.0, 6.0, 6.0, version=3, staleness=0, update=3),
        Iteration(1, 1, 3.0, 7.0, 7.0, version=2, staleness=2, update=4),
    ]
    assert len(run) == 6


def test_a_waiting_worker_begins_from_the_model_as_it_is_then() -> None:
    """SSP(1): worker 0 waits from 2 to 5 after two pushes, then starts from three updates."""
    run = schedule(SSP(1), [[1.0, 1.0, 1.0], [5.0, 5.0, 5.0]])
    assert run.release.tolist() == [1.0, 5.0, 10.0, 5.0, 10.0, 15.0]
    assert run.version.tolist() == [0, 1, 3, 0, 3, 5]
    assert run.staleness.tolist() == [0, 0, 0, 2, 1, 0]
    assert (run.waiting_seconds, run.total_seconds, run.updates) == (3.0 + 4.0, 15.0, 6)


def test_ends_at_the_same_time_come_by_rank() -> None:
    run = schedule(ASP(), lambda *_: 1.0, workers=4, iterations=2)
    assert run.update.reshape(4, 2).T.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@given(st.sampled_from([BSP(), SSP(2), ASP(), DSSP(1, 4), ElasticBSP(4)]), st.integers(0, 99))
def test_versions_updates_and_staleness_agree(synchroniser: Synchroniser, seed: int) -> None:
    def seconds(worker: int, iteration: int) -> float:
        return 1.0 + (seed * (worker + 1) * 7 + 13 * iteration**2) % 11

    run = schedule(synchroniser, seconds, workers=4, iterations=12)
    assert len(run.update) == 48
    assert sorted(set(run.update.tolist())) == list(range(run.updates)), "no number is left out"
    assert (run.version + run.staleness <= run.update).all()
    together = isinstance(synchroniser, BSP | ElasticBSP)  # kept until a barrier releases all
    entered = run.release if together else run.push
    ends = {update: entered[run.update == update].max() for update in range(run.updates)}
    for start, push, version, stale in zip(
        run.start, run.push, run.version, run.staleness, strict=True
    ):
        seen = [update for update, end in ends.items() if end < start]
        assert seen == list(range(len(seen)))
        assert len(seen) <= version
        assert version == 0 or ends[int(version) - 1] <= start
        assert version + stale == 0 or ends[int(version + stale) - 1] <= push


def test_without_an_end_it_goes_on() -> None:
    run = list(islice(EventLoop(BSP(), lambda worker, _: worker + 1.0, 2).run(), 2001))
    assert run[-1].iteration == 1000
    assert run[-1].release == 2.0 * 1001


def test_who_leaves_loses_the_running_iteration_and_nobody_waits() -> None:
    changes = [Change(2.5, 1)]
    run = schedule(BSP(), [[1.0] * 4, [2.0] * 4], changes=changes)
    assert run.worker.tolist() == [0, 0, 0, 0, 1]
    assert run.release.tolist() == [2.0, 3.0, 4.0, 5.0, 2.0]  # at 3 its own push is the last
    late = schedule(BSP(), [[1.0] * 4, [2.0] * 4], changes=[Change(3.5, 1)])
    assert late.release.tolist() == [2.0, 3.5, 4.5, 5.5, 2.0]  # the leave is what ends the wait


def test_what_a_leaver_has_pushed_enters_and_it_is_never_released() -> None:
    run = schedule(BSP(), [[1.0, 1.0], [2.0, 2.0]], changes=[Change(1.5, 0)])
    assert run.update.tolist() == [0, 0, 1]
    assert run.release.tolist() == [math.inf, 2.0, 4.0]
    assert run.waiting_seconds == 0.0


def test_who_joins_begins_at_once() -> None:
    changes = [Change(0.5, 2, joins=True), Change(1.5, 0), Change(3.0, 0, joins=True)]
    run = schedule(ASP(), lambda *_: 1.0, workers=2, iterations=2, changes=changes)
    starts = [run.start[run.worker == worker].tolist() for worker in range(3)]
    assert starts == [[0.0, 3.0], [0.0, 1.0], [0.5, 1.5]]


def test_what_ran_when_a_worker_left_is_not_pushed_after_it_is_back() -> None:
    run = schedule(ASP(), [[1.0]], changes=[Change(0.5, 0), Change(0.6, 0, joins=True)])
    assert (run.start.tolist(), run.push.tolist()) == ([0.6], [1.6])


def test_a_worker_may_leave_with_a_kept_push_twice() -> None:
    changes = [Change(1.5, 0), Change(1.6, 0, joins=True), Change(2.7, 0)]
    run = schedule(BSP(), [[1.0] * 3, [3.0] * 3], changes=changes)
    assert run.update[run.worker == 0].tolist() == [-1, 0]


def test_a_rejoiner_drops_the_push_that_was_kept() -> None:
    changes = [Change(1.5, 0), Change(1.6, 0, joins=True)]
    run = schedule(BSP(), [[1.0] * 3, [3.0] * 3], changes=changes)
    assert run.update[:3].tolist() == [-1, 0, 1]
    assert run.release[:3].tolist() == [math.inf, 3.0, 6.0]


def test_to_leave_twice_or_after_the_end_is_nothing() -> None:
    run = schedule(ASP(), [[1.0], [1.0]], changes=[Change(0.5, 0), Change(0.6, 0), Change(9.0, 1)])
    assert run.worker.tolist() == [1]
    empty = schedule(ASP(), [[1.0]], changes=[Change(0.5, 0)])
    assert (empty.updates, empty.total_seconds, len(empty.push)) == (0, 0.0, 0)


class Stuck(Synchroniser):
    """Synchroniser that releases no worker after the first push."""

    def init(self, workers: int, now: float = 0.0) -> Any:
        return None

    def push(self, state: Any, worker: int, now: float) -> Any:
        return None, SyncDecision()

    def __repr__(self) -> str:
        return "Stuck()"


def test_a_run_in_which_all_wait_says_so() -> None:
    with pytest.raises(
        RuntimeError, match=r"workers 0, 1 wait indefinitely: Stuck\(\) released no worker"
    ):
        schedule(Stuck(), [[1.0], [2.0]])


@pytest.mark.parametrize(
    ("seconds", "options", "message"),
    [
        ([[1.0, math.nan]], {}, r"seconds of worker 0 in iteration 1 must be finite and > 0"),
        ([[1.0], [0.0]], {}, r"seconds of worker 1 in iteration 0 must be finite and > 0, got 0"),
        ([1.0, 2.0], {}, r"shape \(workers, iterations\), at least one each, got \(2,\)"),
        ([[]], {}, r"at least one each, got \(1, 0\)"),
        ([[1.0]], {"workers": 2}, r"must reach to worker 1 and iteration 0, got shape \(1, 1\)"),
        ([[1.0]], {"iterations": 2}, r"must reach to worker 0 and iteration 1, got shape"),
        (lambda *_: 1.0, {"iterations": 2}, "workers must be given"),
        (lambda *_: 1.0, {"workers": 2}, "iterations must be given"),
        ([[1.0]], {"workers": 0}, "workers must be an integer >= 1"),
        ([[1.0]], {"changes": [Change(0.5, 0, joins=True)]}, "worker 0 cannot join"),
    ],
)
def test_bad_input(seconds: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(ASP(), seconds, **options)
