"""Completion of option values in the shell, for options whose values are known names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from lbbsp_core.launch.cluster import FRAMEWORKS

Completion: TypeAlias = Callable[[str], list[str]]


def one_of(names: Iterable[str]) -> Completion:
    """Returns the completion of an option that takes one of these names.

    Example:
        >>> one_of(["tensorflow", "mxnet"])("t")
        ['tensorflow']
    """
    known = tuple(names)

    def complete(incomplete: str) -> list[str]:
        return [name for name in known if name.startswith(incomplete)]

    return complete


def some_of(names: Iterable[str]) -> Completion:
    """Returns the completion of an option that takes a list of these names, with commas between.

    Names that the list contains already are not offered again.

    Example:
        >>> some_of(["bsp", "lbbsp", "dbs"])("bsp,l")
        ['bsp,lbbsp']
    """
    known = tuple(names)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        chosen = before.split(",")
        left = (name for name in known if name not in chosen)
        return [f"{before}{comma}{name}" for name in left if name.startswith(last)]

    return complete


FRAMEWORK: Final = one_of(FRAMEWORKS)
"""Completion of ``--framework``."""
