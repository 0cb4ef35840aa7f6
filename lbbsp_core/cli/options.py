"""Parsers of options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence

import typer

_SPEEDS_REMEDY = "give the speed of each worker relative to the fastest, such as 1,1,0.5"
_SPEEDS_AT_REMEDY = "give the seconds since the start and the new speeds, such as 30:0.5,1,1"


def parse_speeds(text: str, option: str = "--speeds", remedy: str = _SPEEDS_REMEDY) -> list[float]:
    """Parses a list of speeds such as ``1,1,0.5``.

    Args:
        text: Value of the option.
        option: Option to name in an error.
        remedy: Advice to give in an error.

    Raises:
        typer.BadParameter: The text is not a list of numbers.

    Example:
        >>> parse_speeds("1,1,0.5")
        [1.0, 1.0, 0.5]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise _bad(option, "a list of numbers separated by commas", text, remedy) from None


def parse_speeds_at(texts: Sequence[str]) -> list[tuple[float, list[float]]]:
    """Parses changes of speeds such as ``SECONDS:0.5,1,1``.

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
        raise _bad("--speeds-at", "SECONDS:SPEEDS", text, _SPEEDS_AT_REMEDY)
    return seconds, parse_speeds(after, "--speeds-at", _SPEEDS_AT_REMEDY)


def _bad(option: str, form: str, text: str, remedy: str) -> typer.BadParameter:
    return typer.BadParameter(f"must be {form}, got {text!r}: {remedy}", param_hint=option)
