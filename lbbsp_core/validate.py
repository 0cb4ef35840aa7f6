"""Names that a user may mistype."""

from __future__ import annotations

import difflib
from collections.abc import Collection


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
