"""Liveness from the import on: who starts what, and who is waited for."""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from waits import until

from lbbsp_tf import compat
from lbbsp_tf.reliability import _start_watch, leaving, liveness

PROGRAM = _start_watch.__file__


@pytest.fixture
def listening():
    """Returns a function that listens on a free port, and returns the address."""
    sockets = []

    def listen():
        bound = socket.create_server(("127.0.0.1", 0))
        sockets.append(bound)
        return f"127.0.0.1:{bound.getsockname()[1]}"

    yield listen
    for bound in sockets:
        bound.close()


@pytest.fixture
def closed():
    """Address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def program():
    """Returns a function that starts the program beside a worker, and ends those left.

    The worker ends when its standard input does; after a line, it has started.
    """
    started = []

    def start(rank, addresses, mark="", stderr=subprocess.PIPE):
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, PROGRAM, str(rank), json.dumps(addresses), "0.1", mark],
            stdin=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        started.append(parent)
        return parent

    yield start
    for parent in started:
        with parent:
            parent.kill()


PARENT = """
import subprocess, sys
program = [sys.executable, "-I", "-S", *sys.argv[1:]]
child = subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True)
if sys.stdin.readline():
    child.communicate(b"\\n")
"""


def test_it_reports_and_marks_those_whose_ports_are_closed_until_all_have_started(
    listening, closed, tmp_path, program
):
    here, there, mark = listening(), listening(), tmp_path / "waiting"
    parent = program(1, [closed, here, there], str(mark))
    assert parent.stderr.readline() == (
        f"lbbsp: worker 1 ({here}) is waiting for worker 0 ({closed}), which has not "
        "started, or cannot be reached\n"
    )
    assert mark.exists()
    parent.communicate("\n", timeout=30)
    assert not mark.exists()


def test_a_worker_waits_for_nobody_before_its_own_port_is_open(closed, program):
    parent = program(0, [closed, closed])
    time.sleep(3)  # a report would come after 1.1 s
    said = parent.communicate("\n", timeout=30)[1]
    assert said == ""


def test_a_worker_that_ends_before_its_start_ends_those_that_wait_for_it(
    listening, closed, program
):
    addresses = [listening(), closed]
    waits, fails = program(0, addresses), program(1, addresses)
    assert "waiting for worker 1" in waits.stderr.readline()
    fails.stdin.close()
    assert waits.wait(timeout=30) == -signal.SIGKILL
    assert waits.stderr.read().splitlines()[-1] == (
        f"lbbsp: worker 1 ({closed}) ended before all workers had started: see its output; this "
        "worker ends, too"
    )
    fails.wait(timeout=30)
    assert fails.stderr.read() == ""


def test_a_worker_whose_errors_cannot_be_written_is_ended_too(listening, closed, program):
    addresses = [listening(), closed]
    with open("/dev/full", "w") as full:
        waits = program(0, addresses, stderr=full)
    time.sleep(3)  # a report has failed meanwhile
    fails = program(1, addresses)
    fails.stdin.close()
    assert waits.wait(timeout=30) == -signal.SIGKILL


def test_a_worker_that_stays_suspended_is_ended_and_so_are_the_others(listening, closed, program):
    addresses = [listening(), closed]
    waits, stops = program(0, addresses), program(1, addresses)
    until(psutil.Process(stops.pid).children)
    stops.send_signal(signal.SIGSTOP)
    assert stops.wait(timeout=60) == -signal.SIGKILL
    assert f"worker 1 ({closed}) was suspended, and is ended" in stops.stderr.readline()
    assert waits.wait(timeout=30) == -signal.SIGKILL


def test_workers_that_all_fail_do_not_wait_for_each_other(listening, closed, program):
    with socket.create_server(("127.0.0.1", 0)) as bound:
        addresses = [closed, f"127.0.0.1:{bound.getsockname()[1]}"]
    for rank in (0, 1):
        program(rank, addresses).stdin.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if {_start_watch.probe(each, 7) for each in addresses} == {_start_watch.FAILED}:
            break
    while any(_start_watch.probe(each, 7) for each in addresses):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("end", ["", "; os._exit(0)"])
def test_a_script_that_ends_without_a_strategy_has_failed(closed, end):
    task = {"cluster": {"worker": [closed, "127.0.0.1:9"]}, "task": {"type": "worker", "index": 0}}
    environment = {**os.environ, "TF_CONFIG": json.dumps(task)}
    script = f"import os, lbbsp_tf{end}"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (told := _start_watch.probe(closed, 0)):
        time.sleep(0.1)
    assert told == _start_watch.FAILED


def test_a_failure_is_forgotten_when_the_worker_is_started_again(closed, program):
    addresses = [closed, "127.0.0.1:9"]
    fails = program(0, addresses)
    fails.stdin.close()
    while _start_watch.probe(closed, 7) != _start_watch.FAILED:
        time.sleep(0.05)
    program(0, addresses)
    deadline = time.monotonic() + 8  # it would tell for longer
    while _start_watch.probe(closed, 7) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}},
        {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}},
    ],
)
def test_an_import_without_other_workers_has_no_effect(monkeypatch, config):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config) if config else "")
    for name in ("fail_fast", "on_failure", "_watch_start"):
        monkeypatch.setattr(liveness, name, lambda *_: pytest.fail("has an effect"))
    monkeypatch.setattr(liveness.marks, "begin", lambda: pytest.fail("has an effect"))
    liveness.watch_from_import()


def test_a_process_that_reads_data_for_a_worker_is_not_watched(monkeypatch):
    task = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    monkeypatch.setattr(liveness.multiprocessing, "parent_process", lambda: "the worker")
    for name in ("fail_fast", "on_failure", "_watch_start"):
        monkeypatch.setattr(liveness, name, lambda *_: pytest.fail("has an effect"))
    liveness.watch_from_import()


@pytest.mark.parametrize("launched", [False, True])
def test_a_worker_of_several_is_watched_from_its_import_on(monkeypatch, launched):
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    done = []
    monkeypatch.setattr(liveness, "fail_fast", lambda: done.append("fail_fast"))
    monkeypatch.setattr(liveness.marks, "begin", lambda: done.append("begin"))
    monkeypatch.setattr(liveness, "_watch_start", lambda *given: done.append(given))
    monkeypatch.setattr(liveness, "on_failure", lambda _: done.append("on_failure"))
    monkeypatch.setattr(compat, "be_patient", lambda: done.append("be_patient"))
    monkeypatch.setattr(liveness.marks, "are_read", lambda: launched)
    liveness.watch_from_import()
    watched = (2, ["a:1", "b:1", "c:1"])
    tells = [] if launched else ["on_failure", "on_failure"]
    assert done == ["fail_fast", "begin", watched, *tells, "be_patient"]


@pytest.mark.parametrize("has_started", [True, False])
def test_a_script_without_a_balancer_leaves_with_the_others_once_it_has_met_them(
    monkeypatch, has_started
):
    at_exit, done = [], []
    monkeypatch.setattr(liveness.subprocess, "Popen", Mock())
    monkeypatch.setattr(liveness, "daemon_thread", Mock())
    monkeypatch.setattr(liveness, "_has_started", lambda: has_started)
    monkeypatch.setattr(liveness, "on_exit", at_exit.append)
    monkeypatch.setattr(leaving, "leave", lambda *given: done.append(given[:2]))
    liveness._watch_start(1, ["a:1", "b:1"])
    for end in at_exit:
        end()
    assert done == [(1, 2)] * has_started


def test_tensorflow_waits_longer_than_our_heartbeats(monkeypatch):
    given = []
    original = context.Context.configure_coordination_service

    def configure(self, service_type, service_leader="", heartbeat_timeout_in_ms=0):
        given.append(heartbeat_timeout_in_ms)

    monkeypatch.setattr(context.Context, "configure_coordination_service", configure)
    compat.be_patient()
    compat.be_patient()
    configure = context.Context.configure_coordination_service
    configure(context.context(), service_type="standalone", service_leader="a")
    configure(context.context(), "standalone", heartbeat_timeout_in_ms=5)
    assert given == [24_000, 5]
    monkeypatch.undo()
    assert context.Context.configure_coordination_service is original


@pytest.mark.parametrize("handler", [signal.SIG_DFL, lambda *_: None])
def test_sigterm_ends_a_worker_unless_its_script_handles_it(handler):
    default = signal.signal(signal.SIGTERM, handler)
    try:
        if handler is signal.SIG_DFL:
            ignore, library = ctypes.c_void_p(1), ctypes.CDLL(None)
            library.signal(signal.SIGTERM, ignore)  # as TensorFlow, without the knowledge of Python
            assert is_ignored(signal.SIGTERM)
        compat.let_sigterm_end()
        assert not is_ignored(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, default)


def is_ignored(signum):
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path("/proc/self/status").read_text())
    return bool(int(mask, 16) >> signum - 1 & 1)


def test_what_is_started_beside_a_worker_needs_no_package():
    lines = Path(PROGRAM).read_text().splitlines()
    imported = [
        line.split()[1].split(".")[0] for line in lines if line.startswith(("import", "from"))
    ]
    assert set(imported) <= set(sys.stdlib_module_names)


FROM = "error information from remote target /job:{}/replica:0/task:{} while calling"


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (FROM.format("chief", 0), "worker 0 (a:1) cannot be reached any more: see its output"),
        (FROM.format("worker", 1), "worker 2 (c:1) cannot be reached any more: see its output"),
        (
            "aborted by: worker 1 (b:1) has failed: see its output\n" + FROM.format("chief", 0),
            "worker 1 (b:1) has failed: see its output",
        ),
        (
            "Device d is joining a group with incompatible device typeGPU (group_key=1)\n"
            + FROM.format("chief", 0),
            "workers have devices of different types: set CUDA_VISIBLE_DEVICES=-1 for all workers "
            "to train on CPUs, or give each worker a GPU that its TensorFlow can use, see `lbbsp "
            "doctor`",
        ),
    ],
)
def test_the_worker_for_which_this_one_fails_is_named_last(monkeypatch, capsys, told, says):
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    monkeypatch.setattr(sys, "last_value", tf.errors.UnavailableError(None, None, told), False)
    liveness._say_who_is_lost(cluster)
    assert capsys.readouterr().err == f"lbbsp: {says}\n"
    monkeypatch.setattr(sys, "last_value", ValueError(told))
    liveness._say_who_is_lost(cluster)
    assert capsys.readouterr().err == ""
