"""JSON file of a profile: schema, reading and writing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from lbbsp_core.files import read_regular, write_whole
from lbbsp_core.types import is_plausible
from lbbsp_core.validate import parse_json, shortened

SCHEMA = 1
"""Version of the file format."""

_LARGEST_BATCH = 2**53
"""Larger integers are not exact as floats."""

_REMEDY = "create it again with lbbsp profile"


def write_document(path: Path, document: Mapping[str, object]) -> None:
    """Writes a profile atomically: readers see either the old file or the complete new one."""
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_whole(path, text.encode())


def read_points(path: Path) -> tuple[list[int], list[float], int | None]:
    """Reads batches in samples, their seconds, and `out_of_memory_at` from a profile's file."""
    try:
        document = parse_json(read_regular(path), f"{path}: the file")
    except ValueError as error:
        raise ValueError(f"{error}; it must be a complete profile: {_REMEDY}") from None
    if not isinstance(document, dict) or "schema" not in document:
        raise ValueError(f"{path}: the file must be a profile with a schema: {_REMEDY}")
    if document["schema"] != SCHEMA or isinstance(document["schema"], bool):
        raise ValueError(
            f"{path}: schema must be {SCHEMA}, got {shortened(document['schema'])}: {_REMEDY}, or "
            "read it with the version of lbbsp that wrote it"
        )
    points = document.get("points")
    if not isinstance(points, list) or not points:
        raise ValueError(
            f"{path}: points must be a non-empty list, got {shortened(points)}: {_REMEDY}"
        )
    for number, point in enumerate(points):
        if not (
            isinstance(point, dict)
            and _is_number(point.get("batch"), int)
            and _is_number(point.get("seconds"), int, float)
        ):
            raise ValueError(
                f"{path}: points[{number}] must have an integer batch and its seconds, got "
                f"{shortened(point)}: {_REMEDY}"
            )
        if not (0 < point["batch"] < _LARGEST_BATCH and is_plausible(point["seconds"])):
            raise ValueError(
                f"{path}: points[{number}] must have a batch >= 1 below 2^53, and seconds between "
                f"1e-12 and 1e12, got {shortened(point)}: {_REMEDY}"
            )
    cap = document.get("out_of_memory_at")  # `Profile` checks its type
    if cap is not None and _is_number(cap, int) and cap >= _LARGEST_BATCH:
        raise ValueError(
            f"{path}: out_of_memory_at must be below 2^53, got {shortened(cap)}: {_REMEDY}"
        )
    return [point["batch"] for point in points], [point["seconds"] for point in points], cap


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
