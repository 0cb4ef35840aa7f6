"""Dataclasses as JSON objects, and back, checked by the types of their fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lbbsp_core.validate import shortened

T = TypeVar("T")

_FINITE = "between -2^63 and 2^63 - 1, and finite"


def to_json(line: Any) -> dict[str, object]:
    """Returns the fields of a dataclass by name, without those that are empty by default."""
    values = ((field, getattr(line, field.name)) for field in fields(line))
    return {field.name: value for field, value in values if value or value != _default(field)}


def from_json(kind: type[T], values: Mapping[str, object], where: str) -> T:
    """Creates a dataclass from an object read as JSON; errors name `where` and the key."""
    schema, hints = _declared(kind)  # type: ignore[arg-type]
    for key in values:
        if key not in schema:
            raise ValueError(f"{where}: key {key!r} is unknown, there are {', '.join(schema)}")
    for key, field in schema.items():
        if key not in values and _default(field) is MISSING:
            raise ValueError(f"{where}: key {key!r} is missing")
    converted = {}
    try:
        for key, value in values.items():
            converted[key] = _convert(hints[key], value)
    except (TypeError, OverflowError) as error:
        expected = _FINITE if isinstance(error, OverflowError) else f"of type {schema[key].type}"
        raise ValueError(f"{where}: {key} must be {expected}, got {shortened(value)}") from None
    return kind(**converted)


@cache
def _declared(kind: type) -> tuple[dict[str, Field[Any]], dict[str, Any]]:
    return {field.name: field for field in fields(kind)}, get_type_hints(kind)


def _default(declared: Field[Any]) -> object:
    """Returns the default of a field; MISSING if it has none."""
    factory = declared.default_factory
    return declared.default if factory is MISSING else factory()


def _convert(hint: Any, value: object) -> object:
    """Returns a JSON value as the type of a field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return None if value is None else _convert(arguments[0], value)
    if origin is tuple and isinstance(value, list):
        if _are_floats(arguments[0], value):
            return tuple(value)
        return tuple(_convert(arguments[0], member) for member in value)
    if origin is Mapping and isinstance(value, dict):
        return {key: _convert(arguments[1], member) for key, member in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError
    if hint in (int, float) and not -(2**63) <= value < 2**63:  # type: ignore[operator]
        raise OverflowError
    return value


def _are_floats(hint: Any, values: list[object]) -> bool:
    """Returns whether no value of a list needs a conversion: most lists, in a long record."""
    if hint is not float and float not in get_args(hint):
        return False
    kinds = set(map(type, values))
    if kinds == {float}:
        return all(map(math.isfinite, values))  # type: ignore[arg-type]
    return hint is not float and kinds == {NoneType}
