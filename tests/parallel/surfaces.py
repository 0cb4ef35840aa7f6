"""Figures of a finished run, as everything that shows them says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from lbbsp_core.report import summarise
from lbbsp_core.report.html.figures import run_report
from lbbsp_core.report.live import LiveRun
from lbbsp_core.runtime.record.figures import Figures, figures_of
from lbbsp_core.runtime.record.record import Run, StepLine, read_run
from lbbsp_core.runtime.record.writer import RunRecord


def check_surfaces(folder: Path, **others: Figures) -> None:
    """Watch, summary, report, and what else is given, say the same of all steps of a record."""
    run, live = read_run(folder), LiveRun(folder)
    assert live.read()
    found = {
        "steps": figures_of(run.with_same_workers()),
        "watch": live.view().so_far,
        "summary": summarise(run).figures,
        "report": run_report(run).figures,
        **others,
    }
    print_table(f"{folder}, {len(run.steps)} steps, {run.starts} start(s)", found)
    same(found)


def check_recent(folder: Path, metrics: Path) -> None:
    """Watch and the file of metrics say the same of the last steps of a record."""
    live = LiveRun(folder)
    assert live.read()
    text = metrics.read_text("utf-8")
    values = {
        name: float(re.search(rf"^lbbsp_{name}_ratio\{{.*\}} (\S+)$", text, re.MULTILINE)[1])
        for name in Figures._fields
    }
    found = {"watch": live.view().recent, "metrics file": Figures(**values)}
    print_table(f"{folder}, the last 20 steps", found)
    same(found)


def part_of(run: Run, steps: Sequence[StepLine], folder: Path) -> Path:
    """Writes some steps of a run as a record of its own."""
    folder.mkdir()
    record = RunRecord(folder / "run.jsonl", run.header)
    for line in steps:
        record.write(line)
    record.close()
    return folder


def same(found: dict[str, Figures]) -> None:
    """Checks that all have the same figures."""
    first = next(iter(found.values()))
    for surface, figures in found.items():
        assert figures == pytest.approx(first, rel=1e-6), surface


def print_table(title: str, found: dict[str, Figures]) -> None:
    """Prints the figures by surface."""
    print(f"\nFIGURES {title}")
    for surface, figures in found.items():
        print(f"FIGURES {surface:<14}" + "".join(f"  {x:.6f}" for x in figures))
