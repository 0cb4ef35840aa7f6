"""Runs a worker script as a real cluster of processes and collects what every rank says."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from lbbsp_core.launch import launch
from lbbsp_core.runtime.record import Run

SCRIPTS = Path(__file__).parent / "scripts"
RESULT = "RESULT "
HELPER = "lbbsp_tf.server"


@dataclass
class Job:
    """What came of a launch."""

    status: int = -1
    lines: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def text(self) -> str:
        """Everything said, by rank."""
        return "\n".join(f"[{rank}] {line}" for rank in self.lines for line in self.lines[rank])

    def results(self, rank: int) -> dict[str, object]:
        """What `rank` printed as ``RESULT name json``, by name."""
        found = {}
        for line in self.lines[rank]:
            if line.startswith(RESULT):
                name, _, value = line[len(RESULT) :].partition(" ")
                found[name] = json.loads(value)
        return found


def run(script: str, *args: str, workers: int, timeout: float = 600, **options: object) -> Job:
    """Launches ``scripts/SCRIPT.py``; no process of it is left when this returns.

    The default timeout is several times what the longest of them takes on a slow and busy machine.
    """
    job = Job()
    job.status = launch(
        [str(SCRIPTS / f"{script}.py"), *args],
        workers=workers,
        timeout=timeout,
        output=lambda rank, line: job.lines[rank].append(line),
        **options,
    )
    sys.stdout.write(job.text)
    left = [p.pid for p in psutil.Process().children(recursive=True) if _runs(p, script)]
    assert not left, f"processes left behind: {left}"
    return job


def _runs(process: psutil.Process, script: str) -> bool:
    try:
        return any(f"{script}.py" in part or part == HELPER for part in process.cmdline())
    except psutil.Error:
        return False


def check_unequal(runs: dict[str, Run], total: int) -> None:
    """Plain BSP's record tells the slow third worker, and the balanced run gives it less."""
    fast, other, slow = _by_rank(runs["even"], "busy_seconds")
    assert slow > 1.5 * max(fast, other), "busy time is each worker's own"
    assert median(step.wall_seconds for step in runs["even"].last_half()) >= slow
    assert all(sum(step.sizes) == total for step in runs["balanced"].steps)
    fast, other, slow = _by_rank(runs["balanced"], "sizes")
    assert slow < 0.75 * min(fast, other)


def _by_rank(run: Run, key: str) -> list[float]:
    lists = (getattr(line, key) for line in run.last_half())
    return [median(values) for values in zip(*lists, strict=True)]
