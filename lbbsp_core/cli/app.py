"""Command line of ``lbbsp``: one module per command."""

from __future__ import annotations

from typing import Annotated

import typer

from lbbsp_core.cli.demo import demo
from lbbsp_core.cli.doctor import doctor
from lbbsp_core.cli.evaluate import evaluate
from lbbsp_core.cli.launch import launch
from lbbsp_core.cli.profile import profile
from lbbsp_core.cli.report import report
from lbbsp_core.cli.simulate import simulate
from lbbsp_core.cli.version import show_version
from lbbsp_core.cli.watch import watch

# All arguments after the script belong to the script, options included.
_STOP_AT_SCRIPT = {"allow_interspersed_args": False}


def application() -> typer.Typer:
    """Builds the command line; ``application()()`` parses ``sys.argv``, runs and exits."""
    app = typer.Typer(
        help="Synchronous data-parallel training that does not wait for the slowest worker.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    app.command(context_settings=_STOP_AT_SCRIPT)(launch)
    for command in (demo, evaluate, simulate, profile, watch, report, doctor):
        app.command()(command)
    return app


def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=show_version,
            is_eager=True,
            help="Show the versions of lbbsp, Python and the installed frameworks, and exit.",
        ),
    ] = False,
) -> None:
    pass  # with a callback, typer expects the name of a command even if there is only one
