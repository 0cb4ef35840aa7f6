"""Checks `tools/gpu_checks.py` without PyTorch and a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import gpu_checks
import gpu_keras
import gpu_torch
import pytest
from gpu_table import Given, print_row
from waits import HANG_SECONDS


def test_each_row_has_four_columns(capsys):
    print_row("a check", "a figure", 1 / 3, "ms")
    print_row("a check", "a text", "one | two")
    assert capsys.readouterr().out.splitlines() == [
        "| a check | a figure | 0.3333 | ms |",
        "| a check | a text | one / two |  |",
    ]


def run(monkeypatch, capsys, *arguments, launch, missing=()):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name not in missing)
    monkeypatch.setattr(gpu_checks, "launch", launch)
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu_checks.main()
    return ended.value.code, capsys.readouterr().out


def test_what_is_missing_is_named_and_the_rest_is_checked(monkeypatch, capsys, tmp_path):
    started = []

    def launch(command, **_options):
        started.append(command[-1])
        # `too-large` must fail on a GPU.
        return int(gpu_checks.CHECKS[command[-1]].fails)

    arguments = "--out", str(tmp_path)
    status, table = run(monkeypatch, capsys, *arguments, launch=launch, missing={"torch"})
    assert status == 1
    assert started == ["resources", *gpu_keras.CHECKS]
    assert table.count("torch is missing") == len(gpu_torch.CHECKS) - 1


def test_a_check_that_fails_or_has_no_time_left_fails_the_run(monkeypatch, capsys):
    def launch(_command, **_options):
        return 124

    status, table = run(monkeypatch, capsys, "--only", "exact", launch=launch)
    assert status == 1
    assert "| exact | FAILED | status 124" in table
    status, table = run(monkeypatch, capsys, "--only", "exact", "--minutes", "0", launch=launch)
    assert status == 1
    assert "raise --minutes" in table


def test_variables_of_a_check_end_with_it(monkeypatch, capsys):
    seen = []

    def launch(command, **_options):
        seen.append((command[-1], os.environ.get("TF_CUDNN_USE_AUTOTUNE")))
        return 0

    status, _ = run(monkeypatch, capsys, "--only", "balance-off", "balance", launch=launch)
    assert (status, seen) == (0, [("balance-off", "0"), ("balance", None)])


def test_without_a_driver_the_resources_are_not_available(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpu_torch.check_resources(Given(quick=True, out=tmp_path))
    assert "not available" in capsys.readouterr().out


@pytest.mark.campaign
def test_keras_is_measured_without_a_gpu_too(tmp_path):
    """Each check runs, with logical CPUs as devices; what is trained is exact."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "tools/gpu_checks.py", "--quick", "--only", *gpu_keras.CHECKS]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'benchmarks'}"}
    table = subprocess.run(
        [*command, "--minutes", "1e3", "--longest", "1e4", "--out", str(tmp_path)],
        cwd=root, env=environment, capture_output=True, text=True, timeout=20 * HANG_SECONDS,
    ).stdout  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert {row[0] for row in rows} >= gpu_keras.CHECKS.keys()
    assert not [row for row in rows if row[1] == "FAILED"]
    apart = [float(row[2]) for row in rows if row[3:] == ["of the way"] and "float32" in row[1]]
    assert len(apart) >= 7
    assert max(apart) < 1e-4
