"""Checks what `tools/gpu_checks.py` does without PyTorch and a GPU."""

import argparse
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import gpu_checks
import pytest
from virtual_time import VirtualTime
from waits import HANG_SECONDS

from lbbsp_core import WorkerSession, read_run

SCALE = gpu_checks.QUICK._replace(global_batch_size=32, steps=(3, 12))


def test_the_slower_worker_gets_less(monkeypatch, tmp_path):
    clocks = threading.local()  # of the workers, which are threads

    def make_session(*arguments, **options):
        session = WorkerSession(*arguments, **options)
        clocks.own = VirtualTime(session.meter)
        return session

    def timed(step, batch):
        clocks.own.compute(0.002 * batch)
        return 0.002 * batch

    sleep = SimpleNamespace(sleep=lambda seconds: clocks.own.compute(seconds))
    monkeypatch.setattr(gpu_checks, "make_step", lambda *_: None)
    monkeypatch.setattr(gpu_checks, "WorkerSession", make_session)
    monkeypatch.setattr(gpu_checks, "timed", timed)
    monkeypatch.setattr(gpu_checks, "time", sleep)
    monkeypatch.setattr(gpu_checks, "LONGEST_STEP", HANG_SECONDS)
    given = argparse.Namespace(scale=SCALE, out=tmp_path)
    pairs = [gpu_checks.Pair(rank, end) for rank, end in enumerate(multiprocessing.Pipe())]
    workers = [threading.Thread(target=gpu_checks.train, args=(pair, given)) for pair in pairs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(HANG_SECONDS)
    even, balanced = (read_run(tmp_path / f"workers_{name}.jsonl") for name in gpu_checks.POLICIES)
    assert [step.sizes for step in even.steps] == [(16, 16)] * 3
    assert len(balanced.steps) == 12
    assert balanced.steps[0].sizes == (16, 16)
    assert balanced.steps[-1].sizes == (24, 8), "it takes three times as long for a sample"


def test_a_silent_peer_is_an_error(monkeypatch):
    monkeypatch.setattr(gpu_checks, "LONGEST_STEP", 0.0)
    end, _other = multiprocessing.Pipe()
    with pytest.raises(TimeoutError, match="worker 1 has sent nothing"):
        gpu_checks.Pair(0, end).all_gather([5])


def test_each_row_has_four_columns(capsys):
    gpu_checks.print_row("a check", "a figure", 1 / 3, "ms")
    gpu_checks.print_row("a check", "a text", "one | two")
    assert capsys.readouterr().out.splitlines() == [
        "| a check | a figure | 0.3333 | ms |",
        "| a check | a text | one / two |  |",
    ]


def test_without_pytorch_the_resources_are_checked_and_the_rest_names_the_remedy(
    monkeypatch, capsys, tmp_path
):
    started = []

    def launch(command, **_options):
        started.append(command[-1])
        return 0

    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(gpu_checks, "launch", launch)
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="True"):
        gpu_checks.main()
    assert started == ["resources"]
    assert capsys.readouterr().out.count("pip install torch") == len(gpu_checks.CHECKS) - 1


def test_a_check_that_fails_or_has_no_time_left_fails_the_run(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: True)
    monkeypatch.setattr(gpu_checks, "launch", lambda command, **_options: 124)
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "--only", "workers"])
    with pytest.raises(SystemExit, match="True"):
        gpu_checks.main()
    assert "| workers | FAILED | status 124" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "--only", "workers", "--minutes", "0"])
    with pytest.raises(SystemExit, match="True"):
        gpu_checks.main()
    assert "raise --minutes" in capsys.readouterr().out


def test_without_a_driver_the_resources_are_not_available(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpu_checks.check_resources(argparse.Namespace(scale=SCALE))
    assert "not available" in capsys.readouterr().out


@pytest.mark.campaign
def test_keras_is_measured_without_a_gpu_too(tmp_path):
    """A restart is exact, by the script that measures it on a GPU."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "tools/gpu_keras.py", "--quick", "--only", "versions", "restart"]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'benchmarks'}"}
    table = subprocess.run(
        [*command, "--minutes", "60", "--longest", "1e4", "--out", str(tmp_path)],
        cwd=root, env=environment, capture_output=True, text=True, timeout=3 * HANG_SECONDS,
    ).stdout  # fmt: skip
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    assert {row[0] for row in rows} >= {"| versions", "| restart"}
    [difference] = [float(row[2]) for row in rows if row[:2] == ["| restart", "float32"]]
    assert difference < 1e-4
    assert "FAILED" not in table
