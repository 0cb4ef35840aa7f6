"""Liveness from the import on: who starts what, and who is waited for."""

import ctypes
import json
import re
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from lbbsp_tf import compat
from lbbsp_tf.reliability import leaving, liveness

TWO = {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("config", "parent"),
    [
        ("", None),
        ({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}, None),
        ({"cluster": TWO, "task": {"type": "evaluator", "index": 0}}, None),
        ({"cluster": TWO, "task": {"type": "worker", "index": 0}}, "the worker"),  # of a data set
    ],
)
def test_an_import_without_other_workers_has_no_effect(monkeypatch, config, parent):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config) if config else "")
    monkeypatch.setattr(liveness.multiprocessing, "parent_process", lambda: parent)
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
    monkeypatch.setattr(
        compat, "extend_heartbeat_timeout", lambda: done.append("extend_heartbeat_timeout")
    )
    monkeypatch.setattr(liveness.marks, "are_read", lambda: launched)
    liveness.watch_from_import()
    watched = (2, ["a:1", "b:1", "c:1"])
    tells = [] if launched else ["on_failure", "on_failure"]
    assert done == ["fail_fast", "begin", watched, *tells, "extend_heartbeat_timeout"]


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
    compat.extend_heartbeat_timeout()
    compat.extend_heartbeat_timeout()
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
        compat.restore_sigterm()
        assert not is_ignored(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, default)


def is_ignored(signum):
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path("/proc/self/status").read_text())
    return bool(int(mask, 16) >> signum - 1 & 1)


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
