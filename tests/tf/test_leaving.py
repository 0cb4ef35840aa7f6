"""Orderly end of a job: who waits for whom, and until when workers are watched."""

import threading
from collections import Counter

import pytest
import tensorflow as tf
from waits import HANG_SECONDS, until

from lbbsp_tf import service as keys
from lbbsp_tf.reliability import leaving


class Service:
    """Coordination service in memory."""

    def __init__(self):
        self.keys, self.changed, self.misses = set(), threading.Condition(), Counter()

    def set_config_key_value(self, key, _value):
        with self.changed:
            self.keys.add(key)
            self.changed.notify_all()

    def get_config_key_value(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.keys, milliseconds / 1000):
                self.misses[key] += 1
                raise tf.errors.DeadlineExceededError(None, None, "not set")
        return ""

    def is_asked_again_and_again(self, key):
        before = self.misses[key]
        return until(lambda: self.misses[key] > before + 3)


class Heartbeat:
    """Notes what the end of the job does with it."""

    def __init__(self, service, own_keys):
        self.service, self.own_keys, self.forgotten = service, own_keys, []
        self.stopped = threading.Event()

    def forget(self, rank):
        self.forgotten.append(rank)

    def stop(self):
        assert self.own_keys <= self.service.keys, "a lost worker is found until all have left"
        self.stopped.set()


@pytest.fixture
def service(monkeypatch):
    service = Service()
    monkeypatch.setattr(keys.context, "context", lambda: service)
    monkeypatch.setattr(leaving, "_POLL_MILLISECONDS", 10)
    return service


def leave(service, rank, workers, own_keys):
    heartbeat = Heartbeat(service, own_keys)
    arguments = rank, workers, heartbeat
    thread = threading.Thread(target=leaving._wait_for_all, args=arguments, daemon=True)
    thread.start()
    return heartbeat, thread


def test_the_leader_watches_until_the_last_worker_has_left(service):
    left = {"lbbsp/left/1", "lbbsp/left/2"}
    leader, thread = leave(service, 0, 3, left)
    first, _ = leave(service, 1, 3, {"lbbsp/left/1"})
    service.set_config_key_value("lbbsp/reached/2", "")
    assert first.stopped.wait(HANG_SECONDS)
    assert service.is_asked_again_and_again("lbbsp/left/2")
    assert leader.forgotten == [1], "one that has left is silent in order"
    assert not leader.stopped.is_set()
    service.set_config_key_value("lbbsp/left/2", "")
    assert leader.stopped.wait(HANG_SECONDS)
    thread.join()


def test_a_worker_waits_until_all_have_reached_their_end(service):
    leader, _ = leave(service, 0, 3, set())
    first, _ = leave(service, 1, 3, {"lbbsp/left/1"})
    assert service.is_asked_again_and_again("lbbsp/reached/all")
    assert service.is_asked_again_and_again("lbbsp/reached/2")
    assert not first.stopped.is_set()
    assert not leader.stopped.is_set()
    leave(service, 2, 3, set())
    assert first.stopped.wait(HANG_SECONDS)
    assert leader.stopped.wait(HANG_SECONDS)
