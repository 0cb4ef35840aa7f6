"""Command ``lbbsp``, which imports no training framework."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final, NoReturn

_REQUIRED: Final = ("numpy", "scipy", "psutil")


def main() -> None:
    """Runs the command line and exits with its status."""
    if any(find_spec(name) is None for name in ("typer", "rich", "packaging")):
        _exit("the lbbsp command needs typer, rich and packaging", ModuleNotFoundError())
    from lbbsp_core.cli.app import application

    try:
        application()(prog_name="lbbsp")  # also as python -m lbbsp_core
    except ImportError as error:
        if not is_of_requirement(error):
            raise
        _exit(f"lbbsp: {' '.join(str(error).split())[:300]}", error)


def is_of_requirement(error: ImportError) -> bool:
    """Returns whether a package that lbbsp itself needs is missing or broken."""
    if error.name is None:  # as of a broken NumPy, but not of ours about an extra
        return type(error) is ImportError and "numpy" in str(error)
    return error.name in _REQUIRED


def _exit(reason: str, error: ImportError) -> NoReturn:
    from lbbsp_core.installation import reinstall

    print(f"{reason}: run {reinstall(error, 'cli')}", file=sys.stderr)
    sys.exit(2)
