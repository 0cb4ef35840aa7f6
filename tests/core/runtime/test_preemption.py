"""SIGTERM as a request to leave with a checkpoint."""

import os
import signal
import threading
import time

import pytest
from waits import until

from lbbsp_core.runtime.options import env
from lbbsp_core.runtime.reliability import marks, preemption
from lbbsp_core.runtime.reliability.preemption import STATUS, PreemptionHandler


@pytest.fixture
def ends(monkeypatch):
    """Collects statuses with which the process would end."""
    statuses = []
    monkeypatch.setattr(preemption, "end_now", statuses.append)
    yield statuses
    for handler in list(preemption._open):
        handler.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_every_training_of_the_process_gets_the_request_once(ends, monkeypatch):
    requests = []
    for name in "ab":
        PreemptionHandler(lambda name=name: requests.append(name)).open()
    terminate()
    terminate()  # of the launcher, at the same time
    assert requests == ["a", "b"]
    PreemptionHandler(lambda: requests.append("late")).open()
    assert requests == ["a", "b", "late"]
    assert not ends
    monkeypatch.setattr(preemption, "REPEAT_SECONDS", 0.0)
    terminate()
    assert ends == [STATUS] == [143]


def test_outside_of_trainings_and_at_a_second_signal_all_workers_end(ends, monkeypatch):
    peers, requests = [], []
    monkeypatch.setattr(preemption, "_first_signal", [])
    monkeypatch.setattr(preemption, "_peers", [])
    preemption.end_with_peers(lambda: peers.append("end"))
    handler = PreemptionHandler(lambda: requests.append("request"))
    handler.open()
    terminate()
    assert (requests, peers) == (["request"], [])
    monkeypatch.setattr(preemption, "REPEAT_SECONDS", 0.0)
    terminate()
    assert (requests, peers) == (["request"], ["end"])
    handler.close()
    terminate()
    assert peers == ["end"] * 2
    assert not ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_closed_handler_is_not_asked_and_the_scripts_own_one_stays(ends):
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
    own = requests.append
    signal.signal(signal.SIGTERM, lambda *_: own("own"))
    try:
        first.open()
        terminate()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert requests == [1, "own"]


def test_a_handler_that_the_script_sets_during_the_training_stays(ends):
    handler, own = PreemptionHandler(lambda: None), lambda *_: None
    handler.open()
    signal.signal(signal.SIGTERM, own)
    try:
        handler.close()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def idle(ends, monkeypatch):
    """An open handler of a training that may be idle, and what it does."""
    monkeypatch.setattr(preemption, "_STEP_SECONDS", 100)
    monkeypatch.setattr(preemption, "_LOOK_SECONDS", 0.01)
    done, state = [], {"idle": True}
    handler = PreemptionHandler(
        lambda: done.append("request"),
        is_idle=lambda: state["idle"],
        save=lambda: done.append("save"),
        leave=lambda: not done.append("leave"),
    )
    handler.open()
    yield handler, done, state
    handler.close()
    for thread in threading.enumerate():
        if thread.name == "lbbsp-preemption":
            thread.join(10)


@pytest.mark.parametrize("fails", [False, True])
def test_a_training_whose_last_step_is_over_leaves(ends, idle, monkeypatch, fails, caplog):
    handler, done, _ = idle
    if fails:
        monkeypatch.setattr(handler, "save", lambda: done.append("save") or 1 / 0)
    monkeypatch.setattr(preemption, "_STEP_SECONDS", 0.1)
    terminate()
    until(lambda: ends)
    assert done == ["request", "save", "leave"]
    assert ends == [STATUS]
    assert ("no checkpoint before this worker leaves" in caplog.text) == fails


def test_a_step_that_begins_at_the_last_moment_keeps_the_process(ends, idle, monkeypatch):
    handler, done, _ = idle
    monkeypatch.setattr(handler, "leave", lambda: bool(done.append("leave")))
    monkeypatch.setattr(preemption, "_STEP_SECONDS", 0.1)
    terminate()
    until(lambda: done.count("leave") >= 2)  # it asks again and again
    assert not ends


def test_a_signal_too_late_to_leave_together_ends_the_process(ends):
    handler = PreemptionHandler(lambda: None)
    handler.open()
    terminate()
    handler.close(leaves=True)
    assert ends == [STATUS]


def test_a_training_that_goes_on_or_ends_does_not_leave(ends, idle, monkeypatch):
    handler, done, state = idle
    terminate()
    until(lambda: "save" in done)
    state["idle"] = False
    monkeypatch.setattr(preemption, "_STEP_SECONDS", 0.1)
    time.sleep(0.5)
    assert not ends
    monkeypatch.setattr(preemption, "_STEP_SECONDS", 100)
    state["idle"] = True
    until(lambda: done.count("save") == 2)
    handler.close()
    monkeypatch.setattr(preemption, "_STEP_SECONDS", 0.1)
    time.sleep(0.5)
    assert not ends


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
