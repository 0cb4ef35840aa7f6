"""Options that several commands take, and how their text is read."""

from __future__ import annotations

from collections.abc import Sequence

import typer

_SPEEDS_CURE = "give each worker's speed relative to the fastest, such as 1,1,0.5"
_SPEEDS_AT_CURE = "give seconds since the start and the speeds from then on, such as 30:0.5,1,1"


def parse_speeds(text: str, option: str = "--speeds", cure: str = _SPEEDS_CURE) -> list[float]:
    """Reads ``1,1,0.5``.

    Args:
        text: What the user wrote.
        option: The option to name in an error.
        cure: What to do instead.

    Raises:
        typer.BadParameter: The text is not a list of numbers.

    Example:
        >>> parse_speeds("1,1,0.5")
        [1.0, 1.0, 0.5]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise _bad(option, "a list of numbers with commas between", text, cure) from None


def parse_speeds_at(texts: Sequence[str]) -> list[tuple[float, list[float]]]:
    """Reads every ``SECONDS:0.5,1,1``.

    Raises:
        typer.BadParameter: A text is not of this form.

    Example:
        >>> parse_speeds_at(["30:0.5,1"])
        [(30.0, [0.5, 1.0])]
    """
    return [_parse_change(text) for text in texts]


def _parse_change(text: str) -> tuple[float, list[float]]:
    before, colon, after = text.partition(":")
    try:
        seconds = float(before)
    except ValueError:
        colon = ""
    if not colon:
        raise _bad("--speeds-at", "SECONDS:SPEEDS", text, _SPEEDS_AT_CURE)
    return seconds, parse_speeds(after, "--speeds-at", _SPEEDS_AT_CURE)


def _bad(option: str, form: str, text: str, cure: str) -> typer.BadParameter:
    return typer.BadParameter(f"must be {form}, got {text!r}: {cure}", param_hint=option)
