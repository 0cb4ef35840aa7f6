"""Environment variables that the plugins of all frameworks read, one function each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

MARKS: Final = "LBBSP_MARKS"  # the folder of a worker's marks, which the launcher reads


def run_dir() -> Path | None:
    """Returns ``LBBSP_RUN_DIR``, the folder of the run record set by ``lbbsp launch --run-dir``."""
    return _path("LBBSP_RUN_DIR")


def metrics_file() -> Path | None:
    """Returns ``LBBSP_METRICS_FILE``, the file for Prometheus' metrics of the run."""
    return _path("LBBSP_METRICS_FILE")


def restart() -> int:
    """Returns ``LBBSP_RESTART``, the number of restarts before this attempt; 0 without launcher."""
    text = os.environ.get("LBBSP_RESTART", "")
    return int(text) if text.isdecimal() else 0


def workers_at_first(workers: int) -> int:
    """Returns how many workers, or replicas, the first attempt of an elastic job had.

    ``LBBSP_ELASTIC`` is "before/now", as the launcher sets it: the result is `workers` times the
    first number over the second.
    """
    text = os.environ.get("LBBSP_ELASTIC", "")
    if not text:
        return workers
    before, _, now = text.partition("/")
    if not (before.isdecimal() and now.isdecimal() and int(before) > 0 < int(now)):
        raise ValueError(
            f"LBBSP_ELASTIC must be the numbers of workers before and now, got {text!r}: for "
            "example 3/2"
        )
    return workers * int(before) // int(now)


def host() -> str:
    """Returns ``LBBSP_HOST``, the name of this machine for users; empty if it is unset."""
    return os.environ.get("LBBSP_HOST", "").strip()


def marks() -> Path | None:
    """Returns ``LBBSP_MARKS``, the folder of this worker's marks for `lbbsp launch`."""
    return _path(MARKS)


def _path(name: str) -> Path | None:
    text = os.environ.get(name, "").strip()
    return Path(text) if text else None
