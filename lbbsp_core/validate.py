"""Checks of arguments, shared by all packages: each returns the value or raises an error."""

from __future__ import annotations

import difflib
import json
import math
import operator
from collections.abc import Callable, Collection
from pathlib import Path
from unicodedata import category


def require_positive(name: str, value: float) -> float:
    """Returns `value` as a float if it is finite and > 0.

    Example:
        >>> require_positive("alpha", 2)
        2.0
    """
    return _require(name, value, lambda number: number > 0, "finite and > 0")


def require_nonnegative(name: str, value: float) -> float:
    """Returns `value` as a float if it is finite and >= 0."""
    return _require(name, value, lambda number: number >= 0, "finite and >= 0")


def require_fraction(name: str, value: float) -> float:
    """Returns `value` as a float if it is in [0, 1).

    Example:
        >>> require_fraction("min_gain", 0)
        0.0
    """
    return _require(name, value, lambda number: 0 <= number < 1, "in [0, 1)")


def require_share(name: str, value: float) -> None:
    """Raises an error unless a value is in (0, 1].

    Raises:
        ValueError: It is not; names the argument and its value.
    """
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value!r}")


def require_integer(name: str, value: float, minimum: int) -> int:
    """Returns `value` as an int if it is of an integer type, no bool, and >= `minimum`.

    Example:
        >>> require_integer("interval", 2.5, 1)
        Traceback (most recent call last):
            ...
        ValueError: interval must be an integer >= 1, got 2.5
    """
    try:
        integer = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        integer = minimum - 1
    if integer < minimum or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer >= {minimum}, got {shortened(value)}")
    return integer


def require_whole(name: str, value: float, minimum: int) -> int:
    """Returns `value` as an int if it is whole and >= `minimum`, such as the quotient 640 / 80."""
    is_whole = isinstance(value, float) and value.is_integer()
    return require_integer(name, int(value) if is_whole else value, minimum)


def require_flag(name: str, value: object) -> bool:
    """Returns `value` if it is True or False: the text "no" would count as true.

    Example:
        >>> require_flag("mean_loss", "no")
        Traceback (most recent call last):
            ...
        TypeError: mean_loss must be True or False, got 'no'
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shortened(value)}")
    return value


def require_path(name: str, value: object) -> Path:
    """Returns `value` as a path.

    Example:
        >>> require_path("record", True)
        Traceback (most recent call last):
            ...
        TypeError: record must be a path, got True: write record="folder/name"
    """
    if not isinstance(value, str | Path):
        raise TypeError(
            f'{name} must be a path, got {shortened(value)}: write {name}="folder/name"'
        )
    if value == "":  # of a variable that is not set; as a path, it is the working directory
        raise ValueError(f'{name} must be a path, got an empty one: write {name}="folder/name"')
    return Path(value)


def require_known(kind: str, name: str, known: Collection[str]) -> str:
    """Returns `name` if it is one of `known`.

    Example:
        >>> require_known("policy", "lbsp", ["bsp", "lbbsp"])
        Traceback (most recent call last):
            ...
        ValueError: there is no policy 'lbsp': did you mean 'lbbsp'? Known names: bsp, lbbsp
        >>> require_known("policy", "foo", ["bsp", "lbbsp"])
        Traceback (most recent call last):
            ...
        ValueError: there is no policy 'foo'. Known names: bsp, lbbsp
    """
    if not isinstance(name, str) or name not in known:
        near = nearest(name, known) if isinstance(name, str) else None
        hint = "." if near is None else f": did you mean {near!r}?"
        raise ValueError(
            f"there is no {kind} {shortened(name)}{hint} Known names: {', '.join(known)}"
        )
    return name


def nearest(name: str, known: Collection[str]) -> str | None:
    """Returns the most similar of some names, in letters of any case; None if none is similar.

    A name is similar to its beginning of at least four letters, too, if only one name begins so.

    Example:
        >>> nearest("mean_up", ["mean_up_seconds", "mean_down_seconds"])
        'mean_up_seconds'
    """
    folded = {candidate.casefold(): candidate for candidate in known}
    folded_name = name.casefold()
    matches = difflib.get_close_matches(folded_name, folded, n=1, cutoff=0.66)
    if not matches and len(folded_name) >= 4:
        begun = [candidate for candidate in folded if candidate.startswith(folded_name)]
        matches = begun if len(begun) == 1 else []
    return folded[matches[0]] if matches else None


def parse_json(data: bytes, where: str) -> object:
    """Parses a JSON text, whose numbers must be finite."""
    try:
        return json.loads(data.decode(), parse_constant=_finite_float, parse_float=_finite_float)
    except (ValueError, RecursionError) as error:  # also of an encoding, and of too many digits
        raise ValueError(f"{where} is not JSON: {error}") from None


def printable(text: str) -> str:
    r"""Returns a text, of one or more lines, without what a terminal interprets.

    Example:
        >>> printable("a\x1b[31m\n\u202eb")
        'a?[31m\nb'
    """
    width_0 = "Cf"  # marks of direction and joiners: with a "?", columns would not fit
    return "".join(
        c if c.isprintable() or c == "\n" else "?" * (category(c) != width_0) for c in text
    )


def one_line(text: str, longest: int = 80) -> str:
    r"""Returns a text on one line, cut off, without what a terminal interprets.

    Example:
        >>> one_line("a\x1b[31m\nb")
        'a?[31m?b'
    """
    return "".join(character if character.isprintable() else "?" for character in text[:longest])


def shortened(value: object) -> str:
    """Returns the repr of a value, for an error message; a long one is cut off."""
    try:
        text = repr(value)
    except ValueError:  # Python converts no integers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _require(name: str, value: float, holds: Callable[[float], bool], constraint: str) -> float:
    try:
        is_valid = not isinstance(value, bool) and math.isfinite(value) and holds(value)
    except (TypeError, OverflowError):  # no number, or an integer beyond all floats
        is_valid = False
    if not is_valid:
        raise ValueError(f"{name} must be {constraint}, got {shortened(value)}")
    return float(value)


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:80]} is not a finite number")
    return number
