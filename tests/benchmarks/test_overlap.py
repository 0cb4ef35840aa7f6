"""The benchmark of hidden communication: what it does where it must not run, and is ended."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from namespaces import namespaces
from waits import until

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overlap.py"
ADDRESSES = ("10.231.81.1", "10.231.81.2")


@pytest.fixture
def start():
    """Returns a function that starts the benchmark."""
    with contextlib.ExitStack() as stack:

        def start(*words, **variables):
            process = subprocess.Popen(
                [sys.executable, SCRIPT, *words],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.terminate)
            return process

        yield start


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
def test_it_says_why_it_cannot_run(start, tmp_path, programs, reason):
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    process = start(PATH=str(tmp_path))
    said, _ = process.communicate(timeout=60)
    assert said.splitlines()[-1].startswith(f"nothing measured: {reason}")
    assert process.returncode == 0


@pytest.mark.parametrize(
    "words",
    [["--workers", "1"], ["--rates", "200,-1"], ["--rates", "2,nan"], ["--rates", "x"],
     ["--steps", "1"]],
)  # fmt: skip
def test_it_names_what_is_wrong(start, words):
    process = start(*words)
    said, _ = process.communicate(timeout=60)
    assert said.splitlines()[-1].startswith(f"overlap.py: error: argument {words[0]}: ")
    assert words[1] in said.splitlines()[-1]
    assert process.returncode == 2


def test_links_are_limited_in_both_directions():
    with namespaces(*ADDRESSES, mbits=200) as names:
        links = [shown("tc", "-n", name, "qdisc", "show") for name in names]
        links += shown("tc", "-n", f"{names[0]}-switch", "qdisc", "show", "root").splitlines()
    assert sum("tbf" in link and "rate 200Mbit" in link for link in links) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("runs", [False, True])
def test_nothing_is_left_once_it_is_ended(start, number, runs):
    with namespaces(*ADDRESSES, mbits=200):
        pass  # is permitted
    process = start("--workers", "2", "--rates", "200", "--verbose")
    until(lambda: f"lbbsp-{process.pid}-1" in shown("ip", "netns", "list"))
    until(lambda: not runs or len(workers(process)) == 2)
    children = workers(process)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert f"lbbsp-{process.pid}-" not in shown("ip", "netns", "list")
    assert not list(Path("/etc/netns").glob(f"lbbsp-{process.pid}-*"))
