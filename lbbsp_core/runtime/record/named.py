"""Reading of the run that a user has named."""

from __future__ import annotations

from pathlib import Path

from lbbsp_core.runtime.record.record import Run, read_run


def read_named_run(path: str | Path) -> Run:
    """Reads a run by the path that a user has given, as `read_run` does.

    Raises:
        ValueError: As in `read_run`, or the record cannot be read; names the remedy.
    """
    try:
        return read_run(path)
    except OSError as error:
        reason = f"cannot be read as a run record: {error.strerror}"
        remedy = "name the --run-dir of lbbsp launch, or the folder given as record="
        if isinstance(error, FileNotFoundError):
            reason = "has no run record (run.jsonl)"
            if inner := [file.parent.name for file in sorted(Path(path).glob("*/run.jsonl"))]:
                remedy = f"name one of the runs in it: {', '.join(inner)}"
        raise ValueError(f"{path} {reason}: {remedy}") from None
