"""Argument checks shared by all packages: each returns the value, or raises naming it."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Collection


def require_positive(name: str, value: float) -> float:
    """Returns `value` if it is finite and > 0.

    Raises:
        ValueError: It is not; names both.
    """
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and > 0, got {value!r}")
    return float(value)


def require_nonnegative(name: str, value: float) -> float:
    """Returns `value` if it is finite and >= 0.

    Raises:
        ValueError: It is not; names both.
    """
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and >= 0, got {value!r}")
    return float(value)


def require_integer(name: str, value: float, least: int) -> int:
    """Returns `value` as an int if it is an integer >= `least`.

    Raises:
        ValueError: It is not; names both.

    Example:
        >>> require_integer("interval", 2.5, 1)
        Traceback (most recent call last):
            ...
        ValueError: interval must be an integer >= 1, got 2.5
    """
    try:
        whole = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        whole = least - 1
    if whole < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return whole


def require_known(what: str, name: str, known: Collection[str]) -> str:
    """Returns `name` if it is one of `known`.

    Raises:
        ValueError: It is not; says which known one is nearest.

    Example:
        >>> require_known("policy", "lbsp", ["bsp", "lbbsp"])
        Traceback (most recent call last):
            ...
        ValueError: there is no policy 'lbsp': did you mean 'lbbsp'? There are bsp, lbbsp
    """
    if name not in known:
        (nearest,) = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ValueError(
            f"there is no {what} {name!r}: did you mean {nearest!r}? There are {', '.join(known)}"
        )
    return name
