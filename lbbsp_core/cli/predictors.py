"""Option ``--predictors``."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import typer

from lbbsp_core.cli.options import split_names
from lbbsp_core.registry import PREDICTORS

ALL: Final = "all"
"""Stands for all names of a kind."""

Predictors: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help=f"Predictors: all, or some of {', '.join(PREDICTORS)}. Add options as in "
        "narx:hidden=4. Name your own class as module:Name.",
    ),
]
"""Option ``--predictors`` of a command."""


def parse_predictors(text: str) -> list[str]:
    """Returns the names of a list of predictors; ``all`` stands for those that are installed."""
    if text == ALL:
        return [name for name, component in PREDICTORS.items() if component.is_available]
    if not (names := split_names(text)):
        raise ValueError(f"no predictor is named: choose from {', '.join(PREDICTORS)}")
    return names
