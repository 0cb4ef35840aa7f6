"""Findings by topic: how they are counted and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeAlias

from lbbsp_core.doctor.finding import Finding, Status, note, ok, problem

__all__ = ["Diagnosis", "Finding", "count", "figures", "note", "ok", "problem"]

Diagnosis: TypeAlias = Mapping[str, Sequence[Finding]]
"""Findings by topic."""


def count(diagnosis: Diagnosis, status: Status) -> int:
    """Returns the number of findings of a status."""
    return sum(finding.status == status for finding in chain(*diagnosis.values()))


def figures(diagnosis: Diagnosis) -> dict[str, object]:
    """Returns a diagnosis as ``--json`` writes it."""
    return {
        "schema": 1,
        "problems": count(diagnosis, "problem"),
        "notes": count(diagnosis, "note"),
        "topics": {
            topic: [finding._asdict() for finding in findings]
            for topic, findings in diagnosis.items()
        },
    }
