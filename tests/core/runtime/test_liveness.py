"""Threads that end a process which waits for too long."""

import subprocess
import sys
import threading

import pytest

from lbbsp_core.runtime.reliability.liveness import Watch


def run(look, ended, name=None):
    """Runs a thread until it ends the process, which it does not here."""
    thread = Watch(look, name, pause_seconds=0.01, end=lambda *given: ended.append(given))
    thread.start()
    thread.join()


def test_the_thread_looks_until_there_is_a_reason_also_after_an_error():
    found, seconds, ended = iter([None, OSError("no such process"), "worker 1 is lost"]), [], []

    def look(since):
        seconds.append(since)
        now = next(found)
        if isinstance(now, OSError):
            raise now
        return now

    run(look, ended)
    assert ended == [(1, "lbbsp: worker 1 is lost")]
    assert len(seconds) == 3
    assert all(each > 0 for each in seconds)


def test_the_process_is_named():
    ended = []
    run(lambda _: "worker 1 is lost", ended, lambda: "server 0")
    assert ended == [(1, "lbbsp: worker 1 is lost; server 0 ends")]


def test_it_looks_again_if_the_name_cannot_be_told_now():
    ended, names = [], iter([0, "server 0"])
    run(lambda _: "worker 1 is lost", ended, lambda: next(names) + "")
    assert ended == [(1, "lbbsp: worker 1 is lost; server 0 ends")]


def test_a_debugger_leaves_the_thread_running():
    seen = []
    run(lambda _: seen.append(threading.current_thread()) or "enough", [])
    assert seen[0].daemon
    assert seen[0].is_pydev_daemon_thread
    assert seen[0].pydev_do_not_trace


@pytest.mark.parametrize(("seconds", "lasts", "status"), [(0.1, 30, 1), (1000, 0.5, 0)])
def test_a_wait_that_lasts_too_long_ends_the_process(seconds, lasts, status):
    script = (
        "import time\nfrom lbbsp_core.runtime.reliability.liveness import Watchdog\n"
        "watchdog = Watchdog()\n"
        "with watchdog.deadline(0.1, 'not this one'): pass\n"
        f"with watchdog.deadline({seconds}, 'the servers do not respond'): time.sleep({lasts})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    said = "lbbsp: the servers do not respond\n" if status else ""
    assert (done.returncode, done.stderr.decode()) == (status, said)
