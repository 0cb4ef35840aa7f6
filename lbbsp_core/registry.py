"""Synchronisers by their names on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from lbbsp_core.sync import ASP, BSP, DSSP, SSP, ElasticBSP, Synchroniser
from lbbsp_core.validate import require_known


class Scheme(NamedTuple):
    """A kind of synchroniser.

    Args:
        form: How it is written.
        numbers: How many follow its name.
        build: Makes it of them.
    """

    form: str
    numbers: int
    build: Callable[..., Synchroniser]


SCHEMES: Final[Mapping[str, Scheme]] = MappingProxyType(
    {
        "bsp": Scheme("bsp", 0, BSP),
        "ssp": Scheme("ssp:STALENESS", 1, SSP),
        "asp": Scheme("asp", 0, ASP),
        "dssp": Scheme("dssp:LOWER:UPPER", 2, DSSP),
        "elasticbsp": Scheme("elasticbsp:LOOKAHEAD", 1, ElasticBSP),
    }
)


def synchroniser(text: str) -> Synchroniser:
    """Reads ``bsp``, ``ssp:3``, ``ssp:inf``, ``asp``, ``dssp:3:15`` or ``elasticbsp:15``.

    Raises:
        ValueError: An unknown scheme (names the nearest), or numbers that it does not take.

    Example:
        >>> synchroniser("dssp:3:15")
        DSSP(lower=3, upper=15)
    """
    name, *numbers = text.split(":")
    scheme = SCHEMES[require_known("sync", name, SCHEMES)]
    try:
        values = [math.inf if number == "inf" else int(number) for number in numbers]
    except ValueError:
        values = []
    if len(values) != scheme.numbers or len(numbers) != scheme.numbers:
        raise ValueError(f"sync must be written {scheme.form} with whole numbers, got {text!r}")
    return scheme.build(*values)
