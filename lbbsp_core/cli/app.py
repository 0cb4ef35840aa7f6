"""Command line of ``lbbsp``: one module per command, imported when the command is chosen."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module, metadata
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

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
    versions_by_name: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.name or "").lower()
        if FRAMEWORKS.fullmatch(name):
            # The first of a name is imported.
            versions_by_name.setdefault(name, distribution.version)
    yield from sorted(versions_by_name.items())


COMMANDS: Final = {
    "launch": "Run a script on N workers, of this machine or of several hosts.",
    "demo": "Train with plain BSP and with LB-BSP, and compare.",
    "evaluate": "Score speed predictors on recorded traces or runs.",
    "simulate": "Compare policies, predictors and synchronisers in virtual time.",
    "profile": "Measure seconds per step by batch size.",
    "watch": "Show a running job: how busy workers are and who waits for whom.",
    "report": "Show what a run gained and where time went, or compare two runs.",
    "trace": "Write the timeline of a run for Perfetto or Chrome.",
    "doctor": "Check this machine and the cluster, and name what will not work.",
}
"""Commands, each the function of its name in its module, with the first lines of their help."""


class LazyCommand(TyperCommand):
    """Command of which only the name and the first line of help are known until it is chosen."""

    @cached_property
    def loaded(self) -> TyperCommand:
        """The command itself."""
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        # All arguments after the script of launch belong to the script, options included.
        settings = {"allow_interspersed_args": False} if self.name == "launch" else {}
        module = import_module(f"lbbsp_core.cli.{self.name}")
        app.command(self.name, context_settings=settings)(getattr(module, str(self.name)))
        command = get_command(app)
        for parameter in command.params:
            _name_value(parameter)
            if parameter.param_type_name == "argument":
                _show_metavar(parameter)
        return command  # type: ignore[return-value]

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Parses arguments by the command itself, which the context then names."""
        return self.loaded.make_context(*args, **extra)


class LazyGroup(TyperGroup):
    """All commands."""

    def __init__(self, **settings: Any) -> None:
        commands = {name: LazyCommand(name, help=text) for name, text in COMMANDS.items()}
        super().__init__(**{**settings, "commands": commands})


def application() -> typer.Typer:
    """Builds the command line; ``application()()`` parses ``sys.argv``, runs and exits."""
    app = typer.Typer(
        cls=LazyGroup,
        help="Synchronous data-parallel training that does not wait for the slowest worker.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["--help", "-h"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    return app


def _show_metavar(argument: Any) -> None:
    """Makes help show the metavar of an argument as it is, without the type of its values."""
    argument.get_usage_pieces = lambda ctx: [argument.metavar]
    argument.display_type_rich = lambda ctx: ""


def _name_value(parameter: Any) -> None:
    """Makes the error of a value that is no number name the value, in our words."""
    process = parameter.process_value

    def process_value(context: Any, value: object) -> object:
        try:
            return process(context, value)
        except typer.BadParameter as error:
            from lbbsp_core.validate import shortened

            if match := re.search("integer|number|float", error.message):
                kind = "an integer" if match[0] == "integer" else "a number"
                error.message = f"must be {kind}, got {shortened(value)}"
            raise

    parameter.process_value = process_value


def _options(
    _version: bool = typer.Option(
        False,
        "--version",
        callback=show_version,
        is_eager=True,
        help="Show the versions of lbbsp, Python and the installed frameworks, and exit.",
    ),
) -> None:
    pass  # with a callback, typer expects the name of a command even if there is only one
