"""Trace files: recorded iteration times of several workers."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from lbbsp_core.files import read_regular, write_whole
from lbbsp_core.types import Floats, Ints, Measurement, is_plausible
from lbbsp_core.validate import shortened

REQUIRED = ("worker", "step", "samples", "busy_seconds")

_LARGEST_INTEGER = 2**53
_LISTED = 20  # names in a note
LARGEST_DRIVER = 1e18
"""Squares and sums of smaller numbers do not overflow."""


class TraceError(ValueError):
    """Invalid trace file; the message names file, line and column."""


@dataclass(frozen=True, slots=True)
class Series:
    """Iterations of one worker, in the order of their steps.

    Args:
        worker: Number of the worker in the file.
        steps: Global steps, increasing, int64, shape ``(iterations,)``.
        measurements: One measurement per step.
    """

    worker: int
    steps: Ints
    measurements: tuple[Measurement, ...]

    @property
    def speeds(self) -> Floats:
        """Samples per second, shape ``(iterations,)``."""
        return np.array([m.samples_per_second for m in self.measurements], dtype=np.float64)

    def __len__(self) -> int:
        return len(self.measurements)


@dataclass(frozen=True, slots=True)
class Trace:
    """Content of a trace file.

    Args:
        path: Path of the file.
        drivers: Names of the driver columns, in the order of `Measurement.drivers`.
        series: One series per worker, ordered by worker number.
        notes: Remarks on faults that were repaired; empty for a clean file.
    """

    path: Path
    drivers: tuple[str, ...]
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()


def read_trace(path: str | Path) -> Trace:
    """Reads ``worker,step,samples,busy_seconds`` and any driver columns from a CSV file.

    Two faults are repaired and noted in `Trace.notes`: rows that are not in the order of their
    steps are sorted, and steps that a worker lacks are skipped (its next row counts as its next
    iteration). Workers that are all named by text, such as hosts, are numbered in the order of
    their names. Every other fault is an error, since a guess would change the scores.

    Args:
        path: Path of a UTF-8 text file with a header line. Columns may be in any order.

    Raises:
        TraceError: The file cannot be read, or has no header or rows, a missing or duplicate
            column, an incomplete line, text or a non-finite value in place of a number, samples
            or busy seconds that are not positive, or two rows for the same worker and step.
    """
    path = Path(path)
    try:
        text = read_regular(path).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        names = _header(path, next(reader, []))
        series, notes = _series(path, names, reader)
    except TraceError:
        raise
    except (OSError, ValueError, csv.Error) as error:  # also of an encoding, or of a path
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be read as a CSV text file: {reason}") from error
    if not series:
        raise TraceError(f"{path}, line 2: no rows after the header: record at least one step")
    return Trace(path, tuple(name for name in names if name not in REQUIRED), series, notes)


def write_trace(path: str | Path, trace: Trace) -> None:
    """Writes a trace to a CSV file, from which `read_trace` reads the same numbers.

    The file is complete, or stays as it was. Its folder is created.

    Raises:
        ValueError: The name of a driver cannot be the name of a column.
        OSError: The file cannot be written.
    """
    names = (*REQUIRED, *trace.drivers)
    for name in trace.drivers:
        if not name or name != name.strip() or names.count(name) > 1:
            raise ValueError(
                f"driver {name!r} cannot be the name of a column: it must differ from all other "
                "columns, and have no spaces around it"
            )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")  # which writes all digits of a float
    writer.writerow(names)
    for series in trace.series:
        for step, row in zip(series.steps.tolist(), series.measurements, strict=True):
            writer.writerow((series.worker, step, row.samples, row.busy_seconds, *row.drivers))
    write_whole(path, text.getvalue().encode())


def names_of(traces: Sequence[Trace]) -> list[str]:
    """Returns the file names of traces, or whole paths where a name occurs twice."""
    names = [trace.path.name for trace in traces]
    return [
        name if names.count(name) == 1 else str(trace.path)
        for name, trace in zip(names, traces, strict=True)
    ]


def _header(path: Path, header: list[str]) -> list[str]:
    names = [name.strip() for name in header]
    if not any(names):
        raise TraceError(
            f"{path}, line 1: the file is empty: it must start with a header such as "
            f"{','.join(REQUIRED)}"
        )
    if missing := [name for name in REQUIRED if name not in names]:
        raise TraceError(
            f"{path}, line 1: no column {missing[0]!r} among {', '.join(names)}: the header must "
            f"name {', '.join(REQUIRED)}"
        )
    for number, name in enumerate(names, start=1):
        if not name or names.index(name) != number - 1:
            raise TraceError(f"{path}, line 1, column {number}: {name!r} is empty or named twice")
    return names


def _series(
    path: Path, names: list[str], reader: Iterator[list[str]]
) -> tuple[tuple[Series, ...], tuple[str, ...]]:
    """Reads the rows; returns the series of each worker, and notes on what was repaired."""
    table: dict[int, dict[int, tuple[int, Measurement]]] = {}  # line and values by worker and step
    rows = [(line, cells) for line, cells in enumerate(reader, start=2) if cells]
    notes = _number_workers(rows, names.index("worker"))
    for line, cells in rows:
        worker, step, measurement = _row(f"{path}, line {line}", names, cells)
        entries = table.setdefault(worker, {})
        if step in entries:
            raise TraceError(
                f"{path}, line {line}, column 'step': worker {worker} has step {step} already in "
                f"line {entries[step][0]}: keep one of the two"
            )
        entries[step] = line, measurement
    series = []
    for worker, entries in sorted(table.items()):
        steps = np.array(sorted(entries), np.int64)
        series.append(Series(worker, steps, tuple(entries[step][1] for step in steps.tolist())))
        if late := [entries[step][0] for before, step in pairwise(entries) if step < before]:
            notes.append(f"worker {worker}: steps out of order from line {late[0]}: sorted by step")
        if missing := int(steps[-1] - steps[0]) + 1 - len(steps):
            notes.append(
                f"worker {worker}: {missing} steps missing, the first is "
                f"{int(steps[:-1][np.diff(steps) > 1][0]) + 1}: its rows are taken as consecutive "
                "iterations"
            )
    return tuple(series), tuple(notes)


def _number_workers(rows: list[tuple[int, list[str]]], column: int) -> list[str]:
    """Replaces names of workers, if all have one, by numbers; returns a note that tells them."""
    complete_rows = [cells for _, cells in rows if column < len(cells)]
    names = sorted({cells[column].strip() for cells in complete_rows}, key=_natural)
    if not all(names) or any(map(_is_number, names)) or not names:
        return []
    numbers = {name: str(number) for number, name in enumerate(names)}
    for cells in complete_rows:
        cells[column] = numbers[cells[column].strip()]
    listed = ", ".join(map(shortened, names[:_LISTED])) + ", ..." * (len(names) > _LISTED)
    return [f"workers are numbered from 0 on by name: {listed}"]


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a key by which node2 comes before node10."""
    return [(int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _row(where: str, names: list[str], cells: list[str]) -> tuple[int, int, Measurement]:
    """Returns the worker, the step, and what was measured in it."""
    if len(cells) != len(names):
        name = names[min(len(cells), len(names)) - 1]
        raise TraceError(
            f"{where}, column {name!r}: {len(cells)} of {len(names)} columns: the line does not "
            "match the header; correct or remove it"
        )
    pairs = zip(names, cells, strict=True)
    values = {name: _number(where, name, text) for name, text in pairs}
    worker, step, samples, busy_seconds = (values.pop(name) for name in REQUIRED)
    return int(worker), int(step), Measurement(samples, busy_seconds, tuple(values.values()))


def _number(where: str, name: str, text: str) -> float:
    """Reads a number of a column."""
    rule, remedy = "", "correct or remove the row"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
        if name not in REQUIRED:
            remedy = "remove the column, or write numbers in it"
    if not abs(value) < LARGEST_DRIVER:
        rule = f"a finite number below {LARGEST_DRIVER:g}"
    elif name in ("worker", "step") and not (0 <= value < _LARGEST_INTEGER and value % 1 == 0):
        rule = "a whole number >= 0 below 2^53"
    elif name in ("samples", "busy_seconds") and value <= 0:
        rule, remedy = "> 0", "remove the row (a missing step is allowed)"
    elif name in ("samples", "busy_seconds") and not is_plausible(value):
        rule, remedy = "between 1e-12 and 1e12", "correct the unit, or remove the row"
    if rule:
        text = f"must be {rule}, got {shortened(text)}: {remedy}"
        raise TraceError(f"{where}, column {name!r}: {text}")
    return value
