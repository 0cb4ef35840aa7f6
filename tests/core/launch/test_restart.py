"""Decisions about restarts, without processes."""

from queue import SimpleQueue
from signal import SIGTERM

import pytest

from lbbsp_core.launch.restart import (
    QUICK_SECONDS,
    Attempt,
    RestartLimits,
    next_attempt,
    run_attempts,
)
from lbbsp_core.launch.supervise import Outcome
from lbbsp_core.runtime.reliability.exit import LEFT

KILLED = Outcome(137, "worker 1 was ended by SIGKILL", lost_workers=(1,))
THREE = Attempt((0, 1, 2))
LONG = QUICK_SECONDS + 1


def test_all_workers_return_unless_the_job_is_elastic():
    following, message = next_attempt(THREE, KILLED, RestartLimits(3), LONG)
    assert following == Attempt((0, 1, 2), 1)
    assert message == "restart 1 of 3 with 3 workers"
    following, message = next_attempt(THREE, KILLED, RestartLimits(3, 1), LONG)
    assert following == Attempt((0, 2), 1)
    assert message == "restart 1 of 3 with 2 workers, without worker 1"
    following, message = next_attempt(following, KILLED, RestartLimits(3, 1), LONG)
    assert following == Attempt((0,), 2)
    assert message.endswith("1 worker, without worker 1 (worker 2 of the first attempt)")


def test_several_workers_may_be_preempted_at_once():
    left = Outcome(LEFT, leaving=True, lost_workers=(0, 2))
    following, message = next_attempt(THREE, left, RestartLimits(1, 1), LONG)
    assert following == Attempt((1,), 1)
    assert message == "restart 1 of 1 with 1 worker, without worker 0 and worker 2"


def test_a_helper_or_an_unknown_worker_costs_no_worker():
    for outcome in Outcome(1, "scheduler failed"), Outcome(LEFT, leaving=True):
        following, message = next_attempt(THREE, outcome, RestartLimits(1, 2), LONG)
        assert following == Attempt((0, 1, 2), 1)
        assert message == "restart 1 of 1 with 3 workers"


def test_too_few_survivors_end_the_job_with_the_remedy():
    following, message = next_attempt(Attempt((0, 2), 1), KILLED, RestartLimits(3, 2), LONG)
    assert following is None
    assert message.startswith("not restarted: without worker 1 (worker 2 of the first attempt), ")
    assert "lower --elastic" in message


def test_restarts_are_limited_and_the_last_failure_says_so():
    following, message = next_attempt(Attempt((0, 1), 2), KILLED, RestartLimits(2), LONG)
    assert following is None
    assert message.startswith("attempt 3 of 3 has failed, and no restart is left: fix the cause")


@pytest.mark.parametrize(
    "outcome",
    [Outcome(0), Outcome(124), Outcome(128 + SIGTERM, signalled=True, leaving=True)],
)
def test_no_restart_after_success_a_timeout_or_a_signal(outcome):
    assert next_attempt(THREE, outcome, RestartLimits(3, 1), 0.0) == (None, None)


def test_without_restarts_nothing_is_said():
    assert next_attempt(THREE, KILLED, RestartLimits(), 0.0) == (None, None)


def test_only_failures_at_once_are_followed_by_a_pause_which_grows():
    attempt, pauses = THREE, []
    for seconds in [1.0] * 8 + [LONG, 1.0]:
        attempt, message = next_attempt(attempt, KILLED, RestartLimits(10), seconds)
        pauses.append(attempt.pause_seconds)
        assert message.endswith(f"in {pauses[-1]:g} s" if pauses[-1] else "workers")
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 0, 1]
    assert attempt._replace(quick_failures=9999).pause_seconds == 60


def test_a_signal_while_an_attempt_is_ended_prevents_the_next_one():
    signals, said = [], []

    def run(attempt):
        signals.append(SIGTERM)
        return KILLED

    assert run_attempts(run, 3, RestartLimits(3), SimpleQueue(), signals, said.append) == 143
    assert said == [KILLED.message]


def test_a_signal_after_success_changes_nothing():
    run, limits = lambda _: Outcome(0), RestartLimits(3)
    assert run_attempts(run, 1, limits, SimpleQueue(), [SIGTERM], print) == 0
