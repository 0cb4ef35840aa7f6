"""Findings of `lbbsp doctor`, and the line in which a plugin reports its own.

The core imports no framework: what must be checked with one is checked by the plugin, in a process
of its own, ``python -m lbbsp_tf.doctor``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final, Literal, NamedTuple, TypeAlias

Status: TypeAlias = Literal["ok", "note", "problem"]

_MARK: Final = "LBBSP_DOCTOR "


class Finding(NamedTuple):
    """One line of a diagnosis.

    Args:
        check: What was checked, in a few words.
        status: "ok"; "note" for what works with a limitation; "problem" for what will not work.
        message: What was found, and why it matters.
        remedy: What to do about it; empty if nothing has to be done.
    """

    check: str
    status: Status
    message: str
    remedy: str = ""


Diagnosis: TypeAlias = Mapping[str, Sequence[Finding]]
"""Findings by topic."""


def ok(check: str, message: str) -> Finding:
    """Returns a finding that needs no action."""
    return Finding(check, "ok", message)


def note(check: str, message: str, remedy: str = "") -> Finding:
    """Returns a finding that limits what works."""
    return Finding(check, "note", message, remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    """Returns a finding that prevents something from working."""
    return Finding(check, "problem", message, remedy)


def count(diagnosis: Diagnosis, status: Status) -> int:
    """Returns the number of findings of a status."""
    return sum(finding.status == status for finding in chain(*diagnosis.values()))


def figures(diagnosis: Diagnosis) -> dict[str, object]:
    """Returns a diagnosis as ``--json`` writes it."""
    topics = {topic: [row._asdict() for row in rows] for topic, rows in diagnosis.items()}
    problems, notes = count(diagnosis, "problem"), count(diagnosis, "note")
    return {"schema": 1, "problems": problems, "notes": notes, "topics": topics}


def print_findings(findings: Iterable[Finding]) -> None:
    """Prints findings as one line, for the process that has started this one."""
    print(_MARK + json.dumps([finding._asdict() for finding in findings]), flush=True)


def read_findings(output: str) -> list[Finding] | None:
    """Returns the findings that a process has printed; None if there is no such line."""
    for line in output.splitlines():
        if line.startswith(_MARK):
            return [Finding(**values) for values in json.loads(line.removeprefix(_MARK))]
    return None
