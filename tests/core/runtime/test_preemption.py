"""SIGTERM as a request to leave with a checkpoint."""

import os
import signal
import threading

import pytest

from lbbsp_core.runtime import env, marks, preemption
from lbbsp_core.runtime.preemption import STATUS, PreemptionHandler


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
    monkeypatch.setattr(preemption, "_REPEAT_SECONDS", 0.0)
    terminate()
    assert ends == [STATUS] == [143]


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


def test_the_launcher_learns_which_worker_was_asked(ends, monkeypatch, tmp_path):
    monkeypatch.setattr(env, "marks", lambda: tmp_path)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    assert not marks.read_marks(tmp_path).preempted
    PreemptionHandler(lambda: None).open()
    terminate()
    assert marks.read_marks(tmp_path).preempted


def test_another_thread_than_the_main_one_changes_nothing(ends):
    thread = threading.Thread(target=PreemptionHandler(lambda: None).open)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
