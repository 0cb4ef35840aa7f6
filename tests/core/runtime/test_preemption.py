"""SIGTERM as a request to leave with a checkpoint."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from lbbsp_core.runtime.options import env
from lbbsp_core.runtime.reliability import marks, preemption
from lbbsp_core.runtime.reliability.preemption import STATUS, PreemptionHandler


class Clock:
    """Time of the module: it passes in sleeps, which return at once."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        assert self.now < 100, "nothing has ended the wait"


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(preemption, "time", clock)
    return clock


@pytest.fixture
def ends(monkeypatch, clock):
    """Collects statuses with which the process would end."""
    statuses = []
    monkeypatch.setattr(preemption, "end_now", statuses.append)
    yield statuses
    for handler in list(preemption._open):
        handler.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_every_training_of_the_process_gets_the_request_once(ends, clock):
    requests = []
    for name in "ab":
        PreemptionHandler(lambda name=name: requests.append(name)).open()
    terminate()
    clock.now = 0.9
    terminate()  # of the launcher, at the same time
    assert requests == ["a", "b"]
    PreemptionHandler(lambda: requests.append("late")).open()
    assert requests == ["a", "b", "late"]
    assert not ends
    clock.now = 1.1
    terminate()
    assert ends == [STATUS] == [143]


def test_outside_of_trainings_and_at_a_second_signal_all_workers_end(ends, clock, monkeypatch):
    peers, requests = [], []
    monkeypatch.setattr(preemption, "_first_signal", [])
    monkeypatch.setattr(preemption, "_peers", [])
    preemption.end_with_peers(lambda: peers.append("end"))
    handler = PreemptionHandler(lambda: requests.append("request"))
    handler.open()
    terminate()
    assert (requests, peers) == (["request"], [])
    clock.now = 1.1
    terminate()
    assert (requests, peers) == (["request"], ["end"])
    handler.close()
    terminate()
    assert peers == ["end"] * 2
    assert not ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_closed_handler_is_not_asked(ends):
    requests = []
    first, second = (PreemptionHandler(lambda i=i: requests.append(i)) for i in range(2))
    first.open()
    first.open()
    second.open()
    first.close()
    terminate()
    assert requests == [1]
    second.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("during", [False, True])
def test_a_handler_that_the_script_sets_stays(ends, during):
    requests = []
    handler = PreemptionHandler(lambda: requests.append("training"))
    if during:
        handler.open()
    signal.signal(signal.SIGTERM, lambda *_: requests.append("own"))
    try:
        handler.open()
        terminate()
        handler.close()
        terminate()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert requests == ["own", "own"]


@pytest.fixture
def idle(ends, clock, monkeypatch):
    """An open handler of a training that may be idle, what it does when, and a signal to it."""
    done, threads = [], []
    monkeypatch.setattr(preemption, "_LOOK_SECONDS", 1.0)
    monkeypatch.setattr(
        preemption,
        "daemon_thread",
        lambda run, name: SimpleNamespace(start=lambda: threads.append(run)),
    )

    def terminate_idle():
        terminate()
        (run,) = threads
        run()

    handler = PreemptionHandler(
        lambda: done.append("request"),
        is_idle=lambda: True,
        save=lambda: done.append(("save", clock.now)),
        leave=lambda: not done.append(("leave", clock.now)),
    )
    handler.open()
    return handler, done, terminate_idle


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        (range(0), [("save", 0), ("leave", 15)]),
        (range(3), [("save", 3), ("leave", 18)]),
        (range(14, 16), [("save", 0), ("save", 16), ("leave", 31)]),  # a step has followed
    ],
)
def test_a_training_whose_last_step_is_over_leaves(ends, clock, idle, busy, expected):
    handler, done, terminate_idle = idle
    handler.is_idle = lambda: clock.now not in busy
    terminate_idle()
    assert done == ["request", *expected]
    assert ends == [STATUS]


def test_a_training_whose_state_cannot_be_saved_leaves_nevertheless(ends, idle, caplog):
    handler, done, terminate_idle = idle
    handler.save = lambda: 1 / 0
    terminate_idle()
    assert (done, ends) == (["request", ("leave", 15)], [STATUS])
    assert "no checkpoint before this worker leaves" in caplog.text


def test_a_step_that_begins_at_the_last_moment_keeps_the_process(ends, clock, idle):
    handler, done, terminate_idle = idle
    handler.leave = lambda: bool(done.append(clock.now)) or clock.now > 17
    terminate_idle()
    assert done[2:] == [15, 16, 17, 18], "it asks again and again"


def test_a_training_that_ends_does_not_leave(ends, clock, idle):
    handler, done, terminate_idle = idle

    def closes():
        if clock.now == 10:
            handler.close()
        return True

    handler.is_idle = closes
    terminate_idle()
    assert (done, clock.now, ends) == (["request", ("save", 0)], 11, [])


def test_a_signal_too_late_to_leave_together_ends_the_process(ends):
    handler = PreemptionHandler(lambda: None)
    handler.open()
    terminate()
    handler.close(leaves=True)
    assert ends == [STATUS]


def test_the_handler_of_a_failed_training_is_replaced(ends):
    requests = []
    failed, handler = (PreemptionHandler(lambda i=i: requests.append(i)) for i in range(2))
    failed.open(alone=True)
    handler.open(alone=True)
    terminate()
    assert requests == [1]
    handler.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_launcher_learns_which_worker_was_asked(ends, monkeypatch, tmp_path):
    monkeypatch.setattr(env, "marks", lambda: tmp_path)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    assert not marks.read_marks(tmp_path).preempted
    PreemptionHandler(lambda: None).open()
    terminate()
    assert marks.read_marks(tmp_path).preempted


def test_marks_are_not_left_where_the_launcher_has_removed_their_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(env, "marks", lambda: tmp_path / "removed")
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    marks.note_preempted()
    assert not (tmp_path / "removed").exists()


def test_another_thread_than_the_main_one_changes_nothing(ends):
    thread = threading.Thread(target=PreemptionHandler(lambda: None).open)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
