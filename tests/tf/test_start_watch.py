"""The program beside a worker that starts: who is waited for, and who ends with whom."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripts import closed_addresses
from waits import HANG_SECONDS, until

from lbbsp_tf.reliability import _start_watch
from lbbsp_tf.reliability._start_watch import FAILED

WORKERS = ["a:0", "b:1", "c:2"]
HERE, GONE = b"", None
WAITS = "worker 0 (a:0) is waiting for worker {}, which {} not started, or cannot be reached"
ENDED = "worker {} ended before all workers had started: see its output; this worker ends, too"
KILLED = ("kill", 7, signal.SIGKILL)


@pytest.fixture
def beside_worker_0(monkeypatch, tmp_path):
    """Returns a function that runs the program, and returns what it says and does, in order.

    It has a number of looks, a second after each other: at what the ports of the workers answer, or
    at a parent that is "suspended" or has "ended". Then the standard input ends, or has a line.
    """

    def run(*looks, line="\n", mark=""):
        done, seen = [], []

        def look(files, *_):
            seen.append(looks[len(seen)] if len(seen) < len(looks) else "over")
            return (files if seen[-1] == "over" else [], [], [])

        def answer(address, rank):
            assert rank == 0
            return seen[-1][int(address[-1])] if seen else done.append("asked itself")

        (tmp_path / "stdin").write_text(line)
        monkeypatch.setattr(sys, "stdin", (tmp_path / "stdin").open())
        monkeypatch.setattr(os, "getppid", lambda: 1 if "ended" in seen else 7)
        monkeypatch.setattr(os, "kill", lambda *given: done.append(("kill", *given)))
        monkeypatch.setattr(signal, "alarm", lambda seconds: None)
        for name, fake in {
            "select": SimpleNamespace(select=look),
            "time": SimpleNamespace(monotonic=lambda: len(seen)),
            "probe": answer,
            "is_suspended": lambda process: seen[-1] == "suspended",
            "print_message": lambda text: done.append(
                (text, os.path.exists(mark)) if mark else text
            ),
            "report_failure": lambda *given: done.append(("tells", *given)),
        }.items():
            monkeypatch.setattr(_start_watch, name, fake)
        _start_watch.main(["0", json.dumps(WORKERS), "2", str(mark)])
        return done

    return run


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(GONE, GONE, GONE)] * 9, []),  # the worker itself has not got so far
        ([(HERE, HERE, HERE)] * 9, []),
        ([(HERE, HERE, GONE)] * 5, [WAITS.format("2 (c:2)", "has")] * 2),
        ([(HERE, GONE, GONE)] * 3, [WAITS.format("1 (b:1), worker 2 (c:2)", "have")]),
        ([(HERE, FAILED, HERE)] * 2, [KILLED, ENDED.format("1 (b:1)")]),
        (["suspended"] * 9 + [(HERE, HERE, HERE), "suspended"], []),
        (["suspended"] * 10, ["worker 0 (a:0) was suspended, and is ended", KILLED]),
    ],
)
def test_what_a_worker_does_while_it_waits_for_the_others(beside_worker_0, looks, expected):
    assert beside_worker_0(*looks) == ["asked itself", *expected]


@pytest.mark.parametrize(
    ("looks", "line", "tells"),
    [
        ([], "", True),
        ([], "\n", False),
        (["ended"], "\n", False),  # with the line, and before this program looks again
        (
            ["ended"] * 2 + [(HERE, HERE, GONE)] * 5,
            "",
            True,
        ),  # a fork holds it open
    ],
)
def test_a_worker_that_ends_before_all_have_started_tells_the_others(
    beside_worker_0, looks, line, tells
):
    told = [("tells", 0, WORKERS)] * tells
    assert beside_worker_0(*looks, line=line) == ["asked itself", *told]


def test_a_launcher_sees_by_a_mark_who_waits_and_ends_the_others_itself(beside_worker_0, tmp_path):
    mark = tmp_path / "mark"
    said = beside_worker_0(*[(HERE, GONE, FAILED)] * 3, line="", mark=mark)
    assert said == [(WAITS.format("1 (b:1)", "has"), True)]
    assert not mark.exists()


def test_errors_that_cannot_be_written_do_not_matter(monkeypatch):
    def write(_):
        raise OSError

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write))
    _start_watch.print_message("something")


def test_a_suspended_process_is_known():
    with subprocess.Popen(["sleep", str(HANG_SECONDS)]) as process:
        assert not _start_watch.is_suspended(process.pid)
        process.send_signal(signal.SIGSTOP)
        until(lambda: _start_watch.is_suspended(process.pid))
        process.kill()
    assert not _start_watch.is_suspended(process.pid), "there is none"


@pytest.fixture
def closed():
    return closed_addresses()


@pytest.fixture
def tell(monkeypatch, closed):
    """Returns a function that starts to tell of the failure of a worker, in a thread."""
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the standard error of the tests stays
    monkeypatch.setattr(_start_watch, "CONNECT_SECONDS", HANG_SECONDS)

    def start(rank):
        arguments = rank, closed
        thread = threading.Thread(target=_start_watch.report_failure, args=arguments, daemon=True)
        thread.start()
        return thread

    return start


def test_workers_that_all_fail_do_not_wait_for_each_other(tell):
    for thread in [tell(0), tell(1)]:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def test_a_failure_is_forgotten_when_the_worker_is_started_again(tell, closed):
    thread = tell(0)
    until(lambda: _start_watch.probe(closed[0], 7) == FAILED)
    assert thread.is_alive(), "worker 1 has not asked"
    until(lambda: _start_watch.probe(closed[0], 0) == FAILED)
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def test_what_is_started_beside_a_worker_needs_no_package():
    lines = Path(_start_watch.__file__).read_text().splitlines()
    imported = [
        line.split()[1].split(".")[0] for line in lines if line.startswith(("import", "from"))
    ]
    assert set(imported) <= set(sys.stdlib_module_names)
