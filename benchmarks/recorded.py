"""Launches a benchmark as a job of workers, and reads its record."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lbbsp_core.runtime.record.record import Run


def run_recorded(arguments: list[str], workers: int, *, verbose: bool, **options: Any) -> Run:
    """Runs a job, whose workers write the run record that `lbbsp launch` asks for.

    Args:
        arguments: The script and its arguments.
        workers: Number of workers.
        verbose: Whether to print what they print.
        **options: Further arguments of `lbbsp_core.launch.launch`.
    """
    from lbbsp_core import read_run
    from lbbsp_core.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        status = launch(
            arguments,
            workers=workers,
            run_dir=Path(folder),
            output=lambda rank, line: verbose and print(f"[{rank}] {line}"),
            **options,
        )
        if status:
            sys.exit(f"the workers failed with status {status}: --verbose shows their output")
        return read_run(folder)
