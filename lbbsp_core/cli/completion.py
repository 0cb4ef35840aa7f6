"""Options that are names, or lists of names."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from lbbsp_core.launch.cluster import FRAMEWORKS

Framework: TypeAlias = Annotated[
    str, typer.Option(help=f"Framework to train with: {' or '.join(FRAMEWORKS)}.")
]
"""Option ``--framework`` of a command."""


def split_names(names: str) -> list[str]:
    """Returns the names of a list such as ``a,b``, without empty ones."""
    return [name for part in names.split(",") if (name := part.strip())]
