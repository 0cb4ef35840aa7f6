"""The benchmark of hidden communication: what it does where it must not run, and is ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from namespaces import namespaces

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overlap.py"
ADDRESSES = ("10.231.81.1", "10.231.81.2")


def start(*words, **variables):
    return subprocess.Popen(
        [sys.executable, SCRIPT, *words],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def shown(program, *words):
    """Returns what `ip` or `tc` prints."""
    return subprocess.run([program, *words], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("programs", "reason"),
    [
        ({}, "ip is not on PATH"),
        ({"ip": "exit 1"}, "tc is not on PATH"),
        ({"ip": "exit 1", "tc": ""}, "this machine allows no network namespaces"),
    ],
)
def test_it_says_why_it_cannot_run(tmp_path, programs, reason):
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    process = start(PATH=str(tmp_path))
    said, _ = process.communicate(timeout=60)
    assert said.splitlines()[-1].startswith(f"nothing measured: {reason}")
    assert process.returncode == 0


@pytest.mark.parametrize("words", [["--workers", "1"], ["--rates", "200,-1"], ["--rates", "x"]])
def test_it_names_what_is_wrong(words):
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
def test_nothing_is_left_once_it_is_ended(number, runs, until):
    with namespaces(*ADDRESSES, mbits=200):
        pass  # is permitted
    process = start("--workers", "2", "--rates", "200", "--verbose")
    last = f"lbbsp-{process.pid}-1"
    until(lambda: last in shown("ip", "netns", "list"))
    until(lambda: not runs or shown("ip", "netns", "pids", last))
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert f"lbbsp-{process.pid}-" not in shown("ip", "netns", "list")
    assert not list(Path("/etc/netns").glob(f"lbbsp-{process.pid}-*"))
