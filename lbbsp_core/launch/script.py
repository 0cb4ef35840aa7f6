"""Checks what a job is to run, before any of its processes is started."""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from itertools import chain, islice
from pathlib import Path
from typing import Final

MAX_NAMES: Final = 10_000
"""Names that a suggestion is chosen from: a folder may be full of files."""

_BINARY: Final = b"\x7fELF"


def check_command(command: Sequence[str]) -> None:
    """Checks that Python can find what it is to run, without importing it.

    Options of Python other than ``-m`` are not checked.
    """
    if command[0] == "-m":
        check_module(command[1] if len(command) > 1 else "")
    elif command[0] == "-":
        raise ValueError(
            "the script must be a file, got '-': workers have no standard input; write the script "
            "to a file"
        )
    elif not command[0].startswith("-"):
        check_script(command[0])


def check_script(script: str) -> None:
    """Raises ValueError if Python cannot run this file; its suffix does not matter to Python.

    Like Python, it accepts a folder or an archive with a file ``__main__.py``.
    """
    path = Path(script)
    if path.is_dir():
        if not (path / "__main__.py").exists():
            scripts = (name for name in _files(path) if name.endswith(".py") and name[0] != "_")
            raise ValueError(
                f"the script must be a file, but {script!r} is a folder without __main__.py: name "
                f"a script in it{_such_as(scripts)}"
            )
    elif not path.exists():
        raise ValueError(f"there is no script {script!r}{_instead_of(script)}")
    elif not os.access(path, os.R_OK):
        raise ValueError(
            f"the script {script!r} cannot be read: no permission; run chmod +r on it, or name "
            "another one"
        )
    elif path.is_file() and _starts_as_binary(path):
        raise ValueError(
            f"the script must be one of Python, but {script!r} is a compiled program: name the "
            "script alone, which this Python runs in every worker"
        )


def check_module(name: str) -> None:
    """Raises ValueError if ``python -m name`` would not find a module; imports none.

    Its parts need be no identifiers: Python runs ``my-script`` as well.
    """
    if not all(name.split(".")) or "/" in name or os.sep in name:
        raise ValueError(
            f"-m needs the name of a module, such as package.train, got {name!r}"
            + (": omit -m to run a file" if os.path.exists(name) else "")
        )
    if name.endswith(".py") and os.path.exists(name):
        raise ValueError(
            f"-m needs the name of a module, got the file {name!r}: omit .py, or omit -m"
        )
    importlib.invalidate_caches()
    spec = _locate(name)
    if spec is None or (places := spec.submodule_search_locations) is None:
        return
    if _find(f"{name}.__main__", places) is None and not _extends_its_path(spec):
        modules = (f"{name}.{each}" for each in _modules(places) if not each.startswith("_"))
        raise ValueError(
            f"{name!r} is a package without a module __main__, which Python cannot run: name one "
            f"of its modules{_such_as(modules)}"
        )


def _locate(name: str) -> ModuleSpec | None:
    """Returns where a module is; None if that is known only after the import of its package."""
    package, _, last = name.rpartition(".")
    places, extensible = None, False
    if package:
        if (parent := _locate(package)) is None:
            return None
        if (places := parent.submodule_search_locations) is None:
            raise ValueError(
                f"there is no module {name!r}, because {package!r} is a file and not a package"
            )
        extensible = _extends_its_path(parent)
    spec = _find(name, places)
    if spec is None and not extensible:
        known = chain(_modules(places), _folders(places))
        near = _nearest(last, islice(known, MAX_NAMES))
        similar = "" if near is None else f" (did you mean {name.removesuffix(last)}{near}?)"
        raise ValueError(
            f"there is no module {name!r}{similar}: workers search the current directory and the "
            "paths of this Python; install its package, or start in the folder that contains it"
        )
    return spec


def _find(name: str, places: Iterable[str] | None) -> ModuleSpec | None:
    """Returns where a module is; unlike `importlib.util.find_spec`, imports no parent of it."""
    search = None if places is None else list(places)
    for finder in sys.meta_path:
        if finder is PathFinder:
            # By the last part, which is all that it reads: with the full name of a folder without
            # __init__.py, it would ask for the parent among the imported modules.
            last = name.rpartition(".")[2]
            spec = PathFinder.find_spec(last, _top() if search is None else search)
        else:
            spec = finder.find_spec(name, search)
        if spec is not None:
            return spec
    return None


def _top() -> list[str]:
    """Returns the folders that ``python -m`` searches for modules outside of packages."""
    return [os.getcwd(), *sys.path]


def _extends_its_path(spec: ModuleSpec) -> bool:
    """Returns whether the code of a package decides where its modules are."""
    get_source = getattr(spec.loader, "get_source", None)
    try:
        return get_source is not None and "__path__" in (get_source(spec.name) or "")
    except (ImportError, OSError):
        return False


def _modules(places: Iterable[str] | None) -> Iterable[str]:
    found = pkgutil.iter_modules(_top() if places is None else list(places))
    return (module.name for module in found)


def _folders(places: Iterable[str] | None) -> Iterator[str]:
    """Yields the names of folders, which are packages also without a file ``__init__.py``."""
    for place in _top() if places is None else places:
        with suppress(OSError), os.scandir(place or os.curdir) as entries:
            for entry in entries:
                if entry.name[0] not in "._" and "." not in entry.name and entry.is_dir():
                    yield entry.name


def _files(folder: Path) -> Iterable[str]:
    """Returns the names of files in a folder, or nothing if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in islice(entries, MAX_NAMES) if entry.is_file())
    except OSError:
        return ()


def _instead_of(script: str) -> str:
    """Returns advice to a user whose script does not exist."""
    path = Path(script)
    if path.name.startswith("python") and path.suffix != ".py":
        return ": name the script alone, which this Python runs in every worker"
    if not path.parent.is_dir():
        return f", because there is no folder {str(path.parent)!r}: correct the path"
    # By stems, since a common suffix makes any two names similar; of equal stems, the one in .py.
    names = sorted(_files(path.parent), key=lambda name: name.endswith(".py"))
    files = {Path(name).stem: name for name in names}
    near = _nearest(path.stem, files)
    if near is not None:
        return f": did you mean {str(path.parent / files[near])!r}?"
    if _is_module(script):
        return f": did you mean -m {script}?"
    return f" in {str(path.parent.absolute())!r}: correct the path, or change the folder"


def _is_module(name: str) -> bool:
    try:
        check_module(name)
    except ValueError:
        return False
    return True


def _nearest(name: str, names: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def _such_as(names: Iterable[str]) -> str:
    name = next(iter(names), None)
    return "" if name is None else f", such as {name}"


def _starts_as_binary(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(_BINARY)) == _BINARY
    except OSError:
        return False
