"""The JSON file of a profile: its schema, and how it is read and written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Version of the file's form."""

_AGAIN = "make it anew with lbbsp profile"


def make_document(
    *,
    device: str,
    points: Sequence[Mapping[str, float]],
    out_of_memory_at: int | None,
    fits: Mapping[str, Any] | None = None,
    best: str | None = None,
) -> dict[str, Any]:
    """A profile as its file holds it.

    Args:
        device: What was measured.
        points: ``{"batch", "seconds", "repeats"}`` each, by ascending batch.
        out_of_memory_at: Smallest batch known not to fit, or None.
        fits: By form, ``{"parameters", "cv_error"}``.
        best: The form that fits best.
    """
    return {
        "schema": SCHEMA,
        "device": device,
        "points": [dict(point) for point in points],
        "out_of_memory_at": out_of_memory_at,
        "fits": dict(fits or {}),
        "best": best,
    }


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a profile in one piece: a reader sees the older file, or the whole new one."""
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def read_document(path: Path) -> dict[str, Any]:
    """Reads a profile's file as it is, once its schema is known to be ours.

    Raises:
        ValueError: It is no JSON, no profile, or of another schema; names file and cure.
        OSError: There is no such file, or it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also of its encoding
        raise ValueError(f"{path}: not a whole JSON file ({error}): {_AGAIN}") from None
    if not isinstance(document, dict) or "schema" not in document:
        raise ValueError(f"{path}: not a profile, it names no schema: {_AGAIN}")
    if document["schema"] != SCHEMA or isinstance(document["schema"], bool):
        raise ValueError(
            f"{path}: schema must be {SCHEMA}, got {document['schema']!r}: {_AGAIN}, or read it "
            "with the version of lbbsp that wrote it"
        )
    return document


def read_points(path: Path) -> tuple[list[int], list[float], int | None]:
    """Batches, seconds, and the batch that ran out of memory.

    Raises:
        ValueError: As `read_document`, or a point is not a pair of numbers.
        OSError: There is no such file, or it cannot be read.
    """
    document = read_document(path)
    points = document.get("points")
    if not isinstance(points, list) or not points:
        raise ValueError(f"{path}: points must be a list of at least one, got {points!r}: {_AGAIN}")
    for number, point in enumerate(points):
        if not (
            isinstance(point, dict)
            and _is(point.get("batch"), int)
            and _is(point.get("seconds"), int, float)
        ):
            raise ValueError(
                f"{path}: points[{number}] must hold a whole batch and its seconds, got "
                f"{point!r}: {_AGAIN}"
            )
    cap = document.get("out_of_memory_at")
    return [point["batch"] for point in points], [point["seconds"] for point in points], cap


def _is(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
