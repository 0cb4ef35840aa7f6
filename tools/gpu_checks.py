"""Measures on a machine with an NVIDIA GPU what the tests cannot, and prints one table.

    PYTHONPATH=.:benchmarks python tools/gpu_checks.py --out FOLDER
    PYTHONPATH=.:benchmarks python tools/gpu_checks.py --quick     # a try on a CPU

Each check has processes of its own. Those of `gpu_keras.py` need TensorFlow and Keras, those of
`gpu_torch.py` PyTorch; without one of these, the checks that need it are not run. The folder gets
run records and profiles.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import gpu_keras
import gpu_torch
from gpu_table import Given, print_row

from lbbsp_core.launch import launch

CHECKS = {**gpu_torch.CHECKS, **gpu_keras.CHECKS}


def read_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small nets and few steps")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=[*CHECKS])
    parser.add_argument("--out", type=Path, help="folder of what is recorded; by default none")
    parser.add_argument("--minutes", type=float, default=14.0, help="limit of the whole run")
    parser.add_argument("--longest", type=float, default=180.0, help="limit of a check in seconds")
    parser.add_argument("--run", choices=CHECKS, help=argparse.SUPPRESS)  # that of this process
    return parser.parse_args()


def run_check(name: str, given: Given, timeout: float) -> str:
    """Runs a check in processes of its own; returns why it failed, or an empty text."""
    check = CHECKS[name]
    if not importlib.util.find_spec(check.needs):
        return f"{check.needs} is missing"
    if timeout <= 0:
        return "the time is up: raise --minutes, or give --only"
    given.out.mkdir(parents=True, exist_ok=True)
    command = [__file__, "--out", str(given.out), "--run", name, *["--quick"] * given.quick]
    status = launch(command, workers=check.workers, devices="all", timeout=timeout,
                    max_restarts=check.restarts, output=show)  # fmt: skip
    if status in (130, 143):
        sys.exit(status)
    fails = check.fails and not given.quick
    return "" if bool(status) == fails else f"status {status}, see standard error"


def show(rank: int, line: str) -> None:
    """Prints a line of a worker: rows to standard output."""
    is_row = line.startswith("| ")
    print(line if is_row else f"[{rank}] {line}", file=sys.stdout if is_row else sys.stderr,
          flush=True)  # fmt: skip


def main() -> None:
    """Runs the checks and prints the table, or runs the one check of this process."""
    given, failures = read_arguments(), 0
    if given.run:
        CHECKS[given.run].run(Given(given.quick, given.out))
        return
    deadline = time.monotonic() + 60 * given.minutes
    os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    print("| check | figure | value | unit |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.only:
            folder, start = (given.out or Path(temporary)) / name, time.monotonic()
            left = min(given.longest, deadline - start)
            with patch.dict(os.environ, CHECKS[name].env):
                why = run_check(name, Given(given.quick, folder), left)
            took = f"{time.monotonic() - start:.1f} s"
            print_row(name, "FAILED" if why else "ended", f"{why}, {took}" if why else took)
            failures += bool(why)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
