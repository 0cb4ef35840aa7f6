"""Liveness from the import on: who starts what, and who is waited for."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tensorflow.python.eager import context

from lbbsp_tf import _start_watch, compat, liveness

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


def test_a_worker_waits_for_those_whose_ports_are_closed_once_its_own_is_open(listening, closed):
    here, there = listening(), listening()
    assert _start_watch.missing_workers(0, [here, there, closed]) == [2]
    assert _start_watch.missing_workers(0, [here, there]) == []
    assert _start_watch.missing_workers(2, [here, there, closed]) == [], "has not got so far"


def test_the_program_reports_and_marks_until_its_input_ends(listening, closed, tmp_path):
    addresses, mark = [closed, listening()], tmp_path / "waiting"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", PROGRAM, "1", json.dumps(addresses), "0.1", str(mark)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline() == (
        f"lbbsp: worker 1 ({addresses[1]}) is waiting for worker 0 ({closed}), which has not "
        "started, or cannot be reached\n"
    )
    assert mark.exists()
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert not mark.exists()


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}},
        {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}},
        {
            "cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]},
            "task": {"type": "worker", "index": 0},
        },
    ],
)
def test_an_import_without_other_workers_has_no_effect(monkeypatch, config):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config) if config else "")
    for name in ("fail_fast", "on_failure", "_watch_start"):
        monkeypatch.setattr(liveness, name, lambda *_: pytest.fail("has an effect"))
    monkeypatch.setattr(liveness.marks, "begin", lambda: pytest.fail("has an effect"))
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
    tells = [] if launched else ["on_failure"]
    assert done == ["fail_fast", "begin", watched, *tells, "be_patient"]


def test_tensorflow_waits_longer_than_our_heartbeats(monkeypatch):
    given = []
    original = context.Context.configure_coordination_service
    monkeypatch.setattr(
        context.Context,
        "configure_coordination_service",
        lambda self, *args, **options: given.append(options["heartbeat_timeout_in_ms"]),
    )
    compat.be_patient()
    compat.be_patient()
    configure = context.Context.configure_coordination_service
    configure(context.context(), service_type="standalone", service_leader="a")
    configure(context.context(), "standalone", heartbeat_timeout_in_ms=5)
    assert given == [24_000, 5]
    monkeypatch.undo()
    assert context.Context.configure_coordination_service is original


def test_what_is_started_beside_a_worker_needs_no_package():
    lines = Path(PROGRAM).read_text().splitlines()
    imported = [line.split()[1] for line in lines if line.startswith(("import", "from"))]
    assert set(imported) <= set(sys.stdlib_module_names)
