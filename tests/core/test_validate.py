"""Checks of arguments: the value is returned, or the error names the constraint and the value."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lbbsp_core.validate import (
    nearest,
    parse_json,
    require_integer,
    require_known,
    require_nonnegative,
    require_positive,
)

NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize(
    ("require", "least", "words", "bad"),
    [
        (require_positive, 1e-9, "finite and > 0", [0.0, -1.0, "1", 10**400]),
        (require_nonnegative, 0, "finite and >= 0", [-1e-9, "1", 10**400]),
        (lambda *given: require_integer(*given, 2), 2, "an integer >= 2", [1, 2.0, 2.5, "2"]),
    ],
)
def test_numbers_in_their_range_are_returned(require, least, words, bad) -> None:
    assert require("gain", least) == least
    for each in (*NOT_FINITE, None, *bad):
        with pytest.raises(ValueError, match=f"gain must be {words}, got"):
            require("gain", each)
    assert type(require_integer("interval", np.int64(3), 2)) is int


def test_require_known_suggests_the_most_similar_name() -> None:
    known = ["bsp", "lbbsp"]
    assert require_known("policy", "bsp", known) == "bsp"
    with pytest.raises(ValueError, match=r"no policy 'lbsp': did you mean 'lbbsp'\? Known names:"):
        require_known("policy", "lbsp", known)
    with pytest.raises(ValueError, match=r"did you mean 'lbbsp'"):
        require_known("policy", "LBBSP", known)
    for distant in ("zzz", "optimal", "b"):
        with pytest.raises(ValueError, match=rf"no policy '{distant}'\. Known names: bsp, lbbsp$"):
            require_known("policy", distant, known)


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("linear", ["narx", "last", "ema0.5"], None),
        ("static", ["proportional", "affine", "saturating"], None),
        ("optimal", ["proportional", "fixed"], None),
        ("ema", ["ema0.5", "narx"], "ema0.5"),
        ("proportionl", ["proportional", "fixed"], "proportional"),
        ("Mean_up", ["mean_up_seconds", "mean_down_seconds"], "mean_up_seconds"),
        ("mean", ["mean_up_seconds", "mean_down_seconds"], None),
        ("b", ["bsp", "lbbsp"], None),
        ("pro", ["proportional", "fixed"], None),
        ("prop", ["proportional", "fixed"], "proportional"),
    ],
)
def test_only_similar_names_are_suggested(name: str, known: list[str], near: str | None) -> None:
    assert nearest(name, known) == near


@pytest.mark.parametrize("text", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity"])
def test_numbers_of_json_are_finite(text: str) -> None:
    assert parse_json(b'{"a": [1e300, 1e-400, 3]}', "file") == {"a": [1e300, 0.0, 3]}
    message = f"file: line 2 is not JSON: {text} is not a finite number"
    with pytest.raises(ValueError, match=message):
        parse_json(f'{{"a": [{text}]}}'.encode(), "file: line 2")
