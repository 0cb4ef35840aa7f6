"""Threads that end a process which waits for too long."""

import threading
from types import SimpleNamespace

from lbbsp_core.runtime.reliability import liveness
from lbbsp_core.runtime.reliability.exit import end_now
from lbbsp_core.runtime.reliability.liveness import Watch, Watchdog


def run(look, ended, name=None):
    """Runs a thread until it ends the process, which it does not here."""
    thread = Watch(look, name, pause_seconds=0.01, end=lambda *given: ended.append(given))
    thread.start()
    thread.join()


def test_the_thread_looks_until_there_is_a_reason_also_after_an_error(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    found, seconds, ended = iter([None, OSError("no such process"), "worker 1 is lost"]), [], []

    def look(since):
        seconds.append(since)
        clock[0] += 1.0
        now = next(found)
        if isinstance(now, OSError):
            raise now
        return now

    run(look, ended)
    assert ended == [(1, "lbbsp: worker 1 is lost")]
    assert seconds == [0.0, 1.0, 1.0]


def test_the_process_is_named_and_it_looks_again_if_the_name_cannot_be_told_now():
    ended, names = [], iter([0, "server 0"])
    run(lambda _: "worker 1 is lost", ended, lambda: next(names) + "")
    assert ended == [(1, "lbbsp: worker 1 is lost; server 0 ends")]


def test_a_debugger_leaves_the_thread_running():
    seen = []
    run(lambda _: seen.append(threading.current_thread()) or "enough", [])
    assert seen[0].daemon
    assert seen[0].is_pydev_daemon_thread
    assert seen[0].pydev_do_not_trace


def test_a_wait_that_lasts_too_long_ends_the_process(monkeypatch):
    clock, watches = [0.0], []
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(Watch, "start", lambda watch: watches.append(watch))
    watchdog = Watchdog()
    (watch,) = watches
    with watchdog.deadline(1.0, "not this one"):
        clock[0] = 0.9
    clock[0] = 2.0
    with watchdog.deadline(10.0, "the servers do not respond"), watchdog.deadline(20.0, "later"):
        clock[0] = 12.0
        assert watch.check(0.2) is None
        clock[0] = 12.1
        assert watch.check(0.2) == "the servers do not respond"
    assert watch.check(0.2) is None
    assert watch.end is end_now
