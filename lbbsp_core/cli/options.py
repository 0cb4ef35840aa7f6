"""Options that several commands have: their parsers, checks of paths, and errors in one line."""

from __future__ import annotations

import functools
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_type_hints

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lbbsp_core.cli import is_of_requirement
from lbbsp_core.files import require_writable, write_whole
from lbbsp_core.validate import one_line, printable

Command = TypeVar("Command", bound=Callable[..., None])

LONGEST_ERROR: Final = 2000  # characters
LONGEST_LINE: Final = 2000  # characters, of a table that nothing bounds
_SHORTEST_NAME: Final = 5

STDOUT: Final = Path("-")
"""Value of ``--json`` that stands for standard output."""

optional: Final = functools.partial(typer.Option, None)
"""Option of a command that is None by default."""

JsonFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the figures to this JSON file; - stands for standard output, and then "
        "everything else goes to standard error.",
    ),
]
"""Option ``--json`` of a command; the parameter's default is None."""


def parse_speeds(text: str) -> list[float]:
    """Parses a list of speeds such as ``1,1,0.5``.

    Example:
        >>> parse_speeds("1,1,0.5")
        [1.0, 1.0, 0.5]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--speeds must be a list of numbers separated by commas, got {text!r}: give the speed "
            "of each worker relative to the fastest, such as 1,1,0.5"
        ) from None


def parse_speeds_at(texts: Sequence[str]) -> list[tuple[float, list[float]]]:
    """Parses changes of speeds such as ``SECONDS:0.5,1,1``.

    Example:
        >>> parse_speeds_at(["30:0.5,1"])
        [(30.0, [0.5, 1.0])]
    """
    changes = []
    for text in texts:
        seconds, _, speeds = text.partition(":")
        try:
            changes.append((float(seconds), [float(part) for part in speeds.split(",")]))
        except ValueError:
            raise ValueError(
                f"--speeds-at must be SECONDS:SPEEDS, got {text!r}: give the seconds since the "
                "start and the new speeds, such as 30:0.5,1,1"
            ) from None
    return changes


def parse_ranks(text: str) -> list[int]:
    """Parses a list of ranks such as ``0,2``.

    Example:
        >>> parse_ranks("0,2")
        [0, 2]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        form = f"--ranks must be a list of integers separated by commas, got {text!r}"
        raise ValueError(f"{form}: give the ranks of workers, such as 0,2") from None


def search_current_directory() -> None:
    """Adds the current directory to the search path of modules, behind all others."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def one_line_errors(command: Command) -> Command:
    """Returns a command whose errors of its input and output end it with one line and status 2."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except BrokenPipeError:  # the reader of our output has ended, which click handles
            raise
        except (ValueError, OSError, ModuleNotFoundError, MemoryError, OverflowError) as error:
            if isinstance(error, ImportError) and is_of_requirement(error):
                raise
            text = " ".join(str(error).split()) or "the memory does not suffice"
            if isinstance(error, OSError) and error.filename and error.strerror:
                text = f"{error.filename}: {error.strerror}"
            elif isinstance(error, OverflowError):
                text = f"a number is too large: {text}"
            text = one_line(text, LONGEST_ERROR) + "..." * (len(text) > LONGEST_ERROR)
            typer.echo(f"lbbsp {command.__name__}: {text}", err=True)
            raise typer.Exit(2) from None

    return run  # type: ignore[return-value]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with an option for each field of the named tuples that are its parameters.

    The command gets the named tuples. A field's default is what that of a parameter would be.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    groups = {}
    for name, parameter in signature.parameters.items():
        members = {name: (parameter.annotation, parameter.default)}
        if hasattr(group := parameter.annotation, "_field_defaults"):
            groups[name], types = group, get_type_hints(group, include_extras=True)
            members = {key: (types[key], value) for key, value in group._field_defaults.items()}
        parameters += [
            inspect.Parameter(key, parameter.KEYWORD_ONLY, default=value, annotation=kind)
            for key, (kind, value) in members.items()
        ]

    @functools.wraps(command)
    def run(**options: object) -> None:
        for name, group in groups.items():
            options[name] = group(**{key: options.pop(key) for key in group._fields})
        command(**options)

    run.__annotations__ = {option.name: option.annotation for option in parameters}
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    return run


class SafeConsole(Console):
    """Console that writes what files contain without what a terminal would interpret.

    Its lines fit into the terminal; in a file they are as long as they must be.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = LONGEST_LINE

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yields the segments of what is to be written."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def consoles(json_file: Path | None, inputs: Iterable[str | Path] = ()) -> tuple[Console, Console]:
    """Returns the consoles of results and of messages of a command with ``--json``.

    Both write to standard error if standard output is for figures, which must not replace `inputs`,
    see `require_writable_file`.
    """
    require_writable_file("--json", json_file, inputs)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of hosts must not end a command on a terminal without UTF-8.
            stream.reconfigure(errors="backslashreplace")
    return SafeConsole(stderr=json_file == STDOUT), SafeConsole(stderr=True)


class FiguresTable(Table):
    """Table whose names fold where a line is too long, and whose figures are shown whole."""

    def __init__(self, names: Iterable[str], figures: Iterable[str], **options: Any) -> None:
        super().__init__(**options)
        for name in names:
            self.add_column(name, overflow="fold", min_width=_SHORTEST_NAME)
        for name in figures:
            self.add_column(name, justify="right", no_wrap=True, min_width=len(name))

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Adds a row; cells may have markup."""
        super().add_row(*cells, **options)
        for column, cell in zip(self.columns, cells, strict=False):
            if column.no_wrap:
                column.min_width = max(column.min_width or 0, Text.from_markup(cell).cell_len)


def show(console: Console, text: str, style: str = "") -> None:
    """Prints a text as it is, on one line."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def note(console: Console, text: str) -> None:
    """Prints what a user should know about the results."""
    show(console, text, "yellow")


def require_writable_file(
    option: str, path: Path | None, inputs: Iterable[str | Path] = ()
) -> None:
    """Checks that a file can be written and is none of the `inputs`, before a long computation.

    `inputs` are files, or folders of runs, that the command reads. None is always right, and so is
    `STDOUT` for ``--json``.
    """
    if path is None or (path == STDOUT and option == "--json"):
        return
    if path == STDOUT:
        raise ValueError(
            f"{option} must be a file, got -: name one, only --json can write to standard output"
        )
    read = (Path(input_path, name) for input_path in inputs for name in ("", "run.jsonl"))
    if os.path.realpath(path) in map(os.path.realpath, read):
        raise ValueError(f"{option} must not be a file that is read, got {path}: name another")
    require_writable(option, path)


def folder(path: str | Path) -> Path:
    """Parses the path of a folder."""
    if path == "":  # which would be the working directory
        raise ValueError("the path is empty: name a folder, or set the variable that names it")
    return Path(path)


def require_writable_folder(option: str, path: Path | None) -> None:
    """Checks that files can be written to a folder, which may have to be created."""
    if path is not None:
        require_writable(option, path, is_folder=True)


def require_picture(option: str, path: Path | None, inputs: Iterable[str | Path] = ()) -> None:
    """Checks that a picture can be drawn to a file, before a long computation."""
    require_writable_file(option, path, inputs)
    if path is not None:
        from lbbsp_core.report.page import plotly_script

        if path.suffix.lower() != ".html":
            raise ValueError(f"{option} must end in .html, got {path}: a picture is an HTML page")
        plotly_script()  # needs packages


def write_figures(path: Path | None, figures: Mapping[str, object]) -> None:
    """Writes figures as JSON, to standard output if the path is `STDOUT`, and nowhere without one.

    The folder of a file is created.
    """
    if path is None:
        return
    text = json.dumps(figures, indent=1)
    if path == STDOUT:
        typer.echo(text)
    else:
        write_whole(path, f"{text}\n".encode())


def split_names(names: str) -> list[str]:
    """Returns the names of a list such as ``a,b``, without empty ones."""
    return [name for part in names.split(",") if (name := part.strip())]
