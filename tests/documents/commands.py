"""Commands in documents: what a reader would type must exist, with these options and values."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import typer
from doc_pages import ROOT
from typer.core import TyperCommand
from typer.testing import CliRunner

from lbbsp_core.cli import launch as launch_command
from lbbsp_core.cli.app import application

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SEPARATORS = frozenset({"&", "&&", "||", ";", "|", ">", "<", ">>", "(", ")"})
PREFIXES = re.compile(r"\w+=.*|exec|srun|-\S+|timeout|\d+")
"""Words before the program: variables, and programs that run it, with their options."""

RUN = {"evaluate", "simulate"}
"""Commands that are run, if all files that they name exist; others are parsed."""


def commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each command of a shell script, without comments and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] = []
        for word in lexer:
            if word in SEPARATORS:
                yield from [command] if command else []
                command = []
            else:
                command.append(word)
        yield from [command] if command else []


def check(command: list[str]) -> None:
    """Checks a command of lbbsp, make or pip, and our files that any command names.

    Raises:
        AssertionError: It has an option that the command of lbbsp does not know or a wrong value,
            or names a target, an extra, an example or a benchmark that does not exist.
    """
    while command and PREFIXES.fullmatch(command[0]):
        command = command[1:]
    program, *words = command or [""]
    name = Path(program).name
    if name == "lbbsp":
        check_lbbsp(words)
    elif name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        unknown = {word for word in words if "=" not in word} - set(targets)
        assert not unknown, f"the Makefile has no target {unknown}"
    elif name == "pip":
        check_extras(words)
    for word in (program, *words):
        if re.match(r"(benchmarks|examples)/.", word):
            assert (ROOT / word).exists(), f"there is no file {word}"


def check_extras(words: list[str]) -> None:
    """Checks that the extras of lbbsp in a requirement exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for word in words:
        if match := re.fullmatch(r"(?:lbbsp|\.)\[(.*)\].*", word):
            unknown = set(match[1].split(",")) - set(project["optional-dependencies"])
            assert not unknown, f"lbbsp has no extra {unknown}"


def check_lbbsp(words: list[str]) -> None:
    """Parses a command of lbbsp. That of ``launch`` runs up to the start of the job."""

    def invoke(command: TyperCommand, context: typer.Context) -> None:
        if _is_run(str(command.name), words):
            run(command, context)

    run = TyperCommand.invoke
    with (
        mock.patch.object(TyperCommand, "invoke", invoke),
        mock.patch.object(launch_command, "launch_job", _start_nothing),
    ):
        result = CliRunner().invoke(application(), words)
    assert result.exit_code == 0, f"lbbsp {' '.join(words)}: {result.output} {result.exception!r}"


def _start_nothing(
    command: list[str], *, workers: int, speeds: list[float] | None, **_: object
) -> int:
    assert speeds is None or len(speeds) == workers, f"{workers} workers, got speeds {speeds}"
    return 0


def _is_run(name: str, words: list[str]) -> bool:
    if "--scenario" in words:
        return False  # takes seconds
    files = [word for word in words[1:] if re.search(r"[./]", word)]
    return name == "launch" or (name in RUN and all(Path(file).exists() for file in files))
