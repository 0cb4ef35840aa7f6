"""Options whose values are known names, and their completion in the shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, TypeAlias

import typer

from lbbsp_core.launch.cluster import FRAMEWORKS

Completion: TypeAlias = Callable[[str], list[str]]


def one_of(names: Iterable[str]) -> Completion:
    """Returns the completion of an option that takes one of these names.

    Example:
        >>> one_of(["tensorflow", "mxnet"])("t")
        ['tensorflow']
    """
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def some_of(names: Iterable[str]) -> Completion:
    """Returns the completion of an option that takes a list of these names, with commas between.

    Names that the list contains already are not offered again.

    Example:
        >>> some_of(["bsp", "lbbsp", "dbs"])("bsp,l")
        ['bsp,lbbsp']
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        left = [name for name in names if name not in before.split(",")]
        return [f"{before}{comma}{name}" for name in left if name.startswith(last)]

    return complete


Framework: TypeAlias = Annotated[
    str,
    typer.Option(
        help=f"Framework to train with: {' or '.join(FRAMEWORKS)}.",
        autocompletion=one_of(FRAMEWORKS),
    ),
]
"""Option ``--framework`` of a command."""


def split_names(names: str) -> list[str]:
    """Returns the names of a list such as ``a,b``, without empty ones."""
    return [name for part in names.split(",") if (name := part.strip())]
