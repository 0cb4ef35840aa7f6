"""Checks what a job is to run, before any of its processes is started."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from lbbsp_core.validate import nearest

_COMMAND: Final = "name the script, which this Python runs in every worker, or -m and a module"


def check_command(command: Sequence[str]) -> None:
    """Raises ValueError if Python cannot find what it is to run; imports nothing.

    Of a module only the outermost package is looked for, since its code may decide where its
    modules are. Options of Python other than ``-m`` are not checked.
    """
    if command[0] == "-m":
        _check_module(command[1] if len(command) > 1 else "")
    elif command[0] == "-":
        raise ValueError(f"the script must be a file, since workers have no input: {_COMMAND}")
    elif not command[0].startswith("-"):
        _check_script(Path(command[0]))


def _check_script(path: Path) -> None:
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise ValueError(f"{str(path)!r} is a folder without __main__.py: {_COMMAND}")
    elif not path.exists():
        near = nearest(path.name, [file.name for file in path.parent.glob("*.py")])
        similar = "" if near is None else f" (did you mean {str(path.with_name(near))!r}?)"
        folder = str(path.parent.absolute())
        raise ValueError(f"there is no script {str(path)!r} in {folder!r}{similar}: {_COMMAND}")
    elif not os.access(path, os.R_OK):
        raise ValueError(f"the script {str(path)!r} cannot be read: run chmod +r on it")
    elif path.is_file():
        with path.open("rb") as stream:
            if stream.read(4) == b"\x7fELF":
                raise ValueError(f"{str(path)!r} is a compiled program: {_COMMAND}")


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    if not top or os.sep in name or (name.endswith(".py") and os.path.exists(name)):
        raise ValueError(
            f"-m needs the name of a module, such as package.train, got {name!r}: omit -m to run "
            "a file"
        )
    # Workers search the current directory, which is not on the path of the command itself.
    importlib.invalidate_caches()
    if PathFinder.find_spec(top, [os.getcwd()]) is None and importlib.util.find_spec(top) is None:
        raise ValueError(
            f"there is no module {top!r}: workers search the current directory and the paths of "
            "this Python; install its package, or start in the folder that contains it"
        )
