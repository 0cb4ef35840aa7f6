"""What all contracts have in common: values, flags, and states that stay as they are."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SLACK = 64  # bytes by which a pickled state may grow: counters get longer

pickled = pickle.dumps


def copied(value: T) -> T:
    """Returns a pickled copy."""
    copy: T = pickle.loads(pickle.dumps(value))
    return copy


def unchanged(method: str, state: object, call: Callable[[], T]) -> T:
    """Returns the result of `call`, which must leave `state` unchanged."""
    before = pickled(state)
    result = call()
    assert pickled(state) == before, f"{method} changed the state it was given"
    return result


def check_flags(thing: object, *names: str) -> None:
    for name in names:
        value = getattr(thing, name, None)
        assert isinstance(value, bool), f"{name} must be True or False, got {value!r}"


def check_value(thing: Any) -> None:
    """Checks that `thing` is a frozen dataclass that compares, hashes, pickles and prints."""
    name = type(thing).__name__
    frozen = getattr(getattr(thing, "__dataclass_params__", None), "frozen", False)
    assert frozen, f"{name} must be a frozen dataclass"
    twin = copied(thing)
    assert twin == thing, f"{thing!r} must equal its pickled copy {twin!r}"
    assert hash(twin) == hash(thing), f"{thing!r} must hash like its pickled copy"
    for field in dataclasses.fields(thing):
        if not field.init:  # no option
            continue
        shown = f"{field.name}={getattr(thing, field.name)!r}"
        assert shown in repr(thing), f"repr must show {shown}, got {thing!r}"
