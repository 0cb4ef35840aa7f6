"""The table of `tools/gpu_checks.py`: its rows, and the checks that print them."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from typing import NamedTuple

from lbbsp_core.profiler import ProfileResult


class Given(NamedTuple):
    """What a check is given.

    Args:
        quick: Whether to take small nets and few steps, as on a CPU.
        out: Folder for what it records.
    """

    quick: bool
    out: Path

    def record(self, name: str) -> Path:
        """Returns the file of a run record."""
        return self.out / f"{name}.jsonl"


class Check(NamedTuple):
    """A check, and the processes that it needs.

    Args:
        run: Prints rows of the table, in each of the processes.
        needs: Package without which it cannot run.
        workers: Number of processes.
        env: Environment variables of the processes.
        fails: Whether the processes fail on a GPU, as they should.
        restarts: How often they are started again.
    """

    run: Callable[[Given], None]
    needs: str
    workers: int = 1
    env: dict[str, str] = {}  # noqa: RUF012
    fails: bool = False
    restarts: int = 0


def print_row(check: str, figure: str, value: object, unit: str = "") -> None:
    """Prints a line of the table."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
    print(f"| {check} | {figure} | {text} | {unit} |", flush=True)


def print_profile(check: str, found: ProfileResult, batches: Container[int] | None = None) -> None:
    """Prints what a profile of a training step has found, and its points at some batches."""
    print_row(check, "device", found.device)
    for point in found.points:
        if batches is None or point.batch in batches:
            print_row(check, f"step with {point.batch}", 1e3 * point.seconds, "ms")
    for name, fit in found.fits.items():
        error = "unknown" if fit.cv_error is None else 100 * fit.cv_error
        print_row(check, f"error of {fit}{', best' * (name == found.best)}", error, "%")
    limit = found.out_of_memory_at
    largest = limit - 1 if limit else found.points[-1].batch
    print_row(check, "largest that fits" if limit else "largest tried", largest, "samples")
    for note in found.notes:
        print_row(check, "note", note)
