"""Option ``--version``: versions of lbbsp, Python and the installed frameworks."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Final

import typer

from lbbsp_core._version import __version__

FRAMEWORKS: Final = re.compile(
    r"numpy|keras(-nightly)?|tensorflow(-(cpu|gpu|intel|macos|rocm))?|tf-nightly(-cpu|-gpu)?"
    r"|mxnet(-(native|mkl|cu\d+(mkl)?))?"
)
"""Names of the distributions that contain NumPy or a framework."""


def show_version(wanted: bool) -> None:
    """Prints the versions and ends the command, if the option is given."""
    if wanted:
        typer.echo("\n".join(f"{name} {version}" for name, version in versions()))
        raise typer.Exit


def versions() -> Iterator[tuple[str, str]]:
    """Yields names and versions, without importing what they name."""
    yield "lbbsp", __version__
    yield "Python", platform.python_version()
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.name or "").lower()
        if FRAMEWORKS.fullmatch(name):
            found.setdefault(name, distribution.version)  # the first of a name is imported
    yield from sorted(found.items())
