"""The benchmark of hidden communication: what it does where it must not run, and is ended."""

import contextlib
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from namespaces import namespaces
from waits import HANG_SECONDS, until

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overlap.py"
ADDRESSES = ("10.231.81.1", "10.231.81.2")


@pytest.fixture
def start():
    """Returns a function that starts the benchmark."""
    with contextlib.ExitStack() as stack:

        def start(*words):
            process = subprocess.Popen(
                [sys.executable, SCRIPT, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.terminate)
            return process

        yield start


def run(monkeypatch, *words):
    """Runs the benchmark in this process, which keeps its handlers of signals."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    runpy.run_path(str(SCRIPT), run_name="__main__")


def shown(program, *words):
    """Returns what `ip` or `tc` prints."""
    return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout


def workers(process):
    """Returns the workers that a benchmark has started."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [child] if "--worker" in child.cmdline() else []
    return found


@pytest.mark.parametrize(
    ("programs", "reason"),
    [
        ({}, "ip is not on PATH"),
        ({"ip": "exit 1"}, "tc is not on PATH"),
        ({"ip": "exit 1", "tc": ""}, "this machine allows no network namespaces"),
    ],
)
def test_it_says_why_it_cannot_run(monkeypatch, capsys, tmp_path, programs, reason):
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    run(monkeypatch)
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"nothing measured: {reason}")


@pytest.mark.parametrize("words", ["--workers 1", "--rates 2,-1", "--rates 2,nan", "--steps 1"])
def test_it_names_what_is_wrong(monkeypatch, capsys, words):
    option, value = words.split()
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, option, value)
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"overlap.py: error: argument {option}: ")
    assert value in last


def test_links_are_limited_in_both_directions():
    with namespaces(*ADDRESSES, mbits=200) as names:
        links = [shown("tc", "-n", name, "qdisc", "show") for name in names]
        links += shown("tc", "-n", f"{names[0]}-switch", "qdisc", "show", "root").splitlines()
    assert sum("tbf" in link and "rate 200Mbit" in link for link in links) == 4


@pytest.mark.parametrize(("number", "runs"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_nothing_is_left_once_it_is_ended(start, number, runs):
    with namespaces(*ADDRESSES, mbits=200):
        pass  # is permitted
    process = start("--workers", "2", "--rates", "200", "--verbose")
    until(lambda: f"lbbsp-{process.pid}-1" in shown("ip", "netns", "list"))
    until(lambda: not runs or len(workers(process)) == 2)
    children = workers(process)
    process.send_signal(number)
    process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 128 + number
    assert not psutil.wait_procs(children, timeout=HANG_SECONDS)[1]
    assert f"lbbsp-{process.pid}-" not in shown("ip", "netns", "list")
    assert not list(Path("/etc/netns").glob(f"lbbsp-{process.pid}-*"))
