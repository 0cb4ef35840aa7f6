"""SIGTERM is a request while a training can save its state."""

import os
import signal
import threading

import pytest

from lbbsp_core.runtime import preemption
from lbbsp_core.runtime.preemption import PreemptionHandler


@pytest.fixture(autouse=True)
def default():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def send():
    os.kill(os.getpid(), signal.SIGTERM)


def test_several_signals_at_once_are_one_request_and_a_later_one_ends_the_process(monkeypatch):
    now, ends, requests = [0.0], [], []
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(preemption, "end_now", ends.append)
    handler = PreemptionHandler(lambda: requests.append(1))
    handler.open()
    send()
    send()
    assert (requests, ends) == ([1], [])
    now[0] = 2.0
    send()
    assert (requests, ends) == ([1], [143])


def test_closed_it_leaves_the_default_and_that_of_a_failed_training_is_replaced():
    requests = []
    failed, handler = (PreemptionHandler(lambda i=i: requests.append(i)) for i in range(2))
    failed.open()
    handler.open()
    send()
    assert requests == [1]
    failed.close()
    assert signal.getsignal(signal.SIGTERM) == handler._handle
    handler.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_script_stays_and_other_threads_change_nothing():
    seen = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    handler = PreemptionHandler(lambda: seen.append(2))
    handler.open()
    send()
    handler.close()
    send()
    assert seen == [1, 1]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    thread = threading.Thread(target=handler.open)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
