"""States of predictors and policies as JSON and arrays, without pickle.

Loading creates numbers, strings, containers, arrays and records of *known* classes, and executes
nothing that is in the file.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Records: TypeAlias = Mapping[str, type]
"""Classes of records by name, ``module:qualified name``."""

_STATE = "state"


def records_of(*states: object) -> dict[str, type]:
    """Returns the classes of the records that states may consist of, by name.

    They are the named tuples and dataclasses of the modules that define those of `states`.
    """
    found: dict[str, type] = {}
    for module in {type(each).__module__ for each in _records_in(states)}:
        for value in vars(sys.modules[module]).values():
            if isinstance(value, type) and _field_names(value) is not None:
                found[_name(value)] = value
    return found


def to_json(value: object, arrays: Arrays) -> Json:
    """Converts a state to JSON; its arrays are added to `arrays` under new names.

    It may consist of numbers, strings, None, tuples, lists, dicts with strings as keys, arrays
    without objects, and records of these.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return number if math.isfinite(number) else {"float": repr(number)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufSU":
        name = f"array{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, list):
        return {"list": [to_json(each, arrays) for each in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: to_json(each, arrays) for key, each in value.items()}}
    names = _field_names(type(value))
    if names is not None:
        held = {name: to_json(getattr(value, name), arrays) for name in names}
        return {"record": _name(type(value)), "fields": held}
    if isinstance(value, tuple):
        return [to_json(each, arrays) for each in value]
    raise TypeError(
        f"a checkpoint cannot hold {type(value).__name__} objects: let states of predictors and "
        "policies be numbers, strings, arrays, containers, named tuples and dataclasses"
    )


def from_json(value: Json, arrays: Mapping[str, npt.NDArray[Any]], records: Records) -> Any:
    """Converts JSON back to a state; the inverse of `to_json`."""
    if isinstance(value, list):
        return tuple(from_json(each, arrays, records) for each in value)
    if not isinstance(value, dict):
        return value
    readers: dict[frozenset[str], Callable[[Any], Any]] = {
        frozenset(["float"]): lambda given: float(given["float"]),
        frozenset(["array"]): lambda given: arrays[given["array"]],
        frozenset(["list"]): lambda given: [from_json(e, arrays, records) for e in given["list"]],
        frozenset(["dict"]): lambda given: {
            key: from_json(each, arrays, records) for key, each in given["dict"].items()
        },
        frozenset(["record", "fields"]): lambda given: records[given["record"]](
            **{key: from_json(each, arrays, records) for key, each in given["fields"].items()}
        ),
    }
    try:
        return readers[frozenset(value)](value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a state cannot be read: {error!r} in an object with the keys {sorted(value)}; it was "
            "saved with another predictor, policy or version of lbbsp"
        ) from None


def to_bytes(value: object) -> bytes:
    """Converts a state to bytes."""
    arrays: Arrays = {}
    text = json.dumps(to_json(value, arrays), allow_nan=False).encode()
    stream = io.BytesIO()
    np.savez(stream, **{_STATE: np.frombuffer(text, np.uint8), **arrays})
    return stream.getvalue()


def from_bytes(data: bytes, records: Records) -> Any:
    """Converts bytes back to a state; the inverse of `to_bytes`."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = dict(archive)
        text = arrays.pop(_STATE).tobytes()
    except Exception as error:  # damaged archives raise errors of a dozen types
        raise ValueError(f"a state cannot be read: {error!r}") from None
    return from_json(json.loads(text), arrays, records)


def _records_in(value: object) -> Iterator[object]:
    """Yields the records in a state."""
    names = _field_names(type(value))
    if names is not None:
        yield value
        for name in names:
            yield from _records_in(getattr(value, name))
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _records_in(each)


def _field_names(kind: type) -> tuple[str, ...] | None:
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple(kind._fields)
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind) if field.init)
    return None


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
