"""Command ``lbbsp``, which imports no training framework."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Runs the command line and exits with its status."""
    if any(find_spec(name) is None for name in ("typer", "rich", "packaging")):
        from lbbsp_core.installation import extra

        print(
            "the lbbsp command needs typer, rich and packaging: run pip install " + extra("cli"),
            file=sys.stderr,
        )
        sys.exit(2)
    from lbbsp_core.cli.app import application

    application()(prog_name="lbbsp")  # also as python -m lbbsp_core
