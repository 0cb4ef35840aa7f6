"""Without this the core comes to import a framework, and families to know each other's classes.

The rooms of the code, and the arrows between them, are those of docs/design.md.

A room is a package or a module directly under `lbbsp_core`, or in `lbbsp_core.runtime`, or a
plugin. `MAY_IMPORT` is the table of all rooms, from the bottom up; a room may import itself, what
is in it, and the rooms listed beside it.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Collection, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PLUGINS = frozenset({"lbbsp_tf", "lbbsp_mx"})
FRAMEWORKS = frozenset({"tensorflow", "keras", "mxnet", "torch", "jax"})

FOUNDATION = frozenset({"_version", "files", "installation", "types", "validate"})
STAGES = FOUNDATION | {
    "measure", "resources", "order", "sampled_order", "work", "cost", "predict", "allocation",
    "_selection", "policy", "reserve", "sync",
}  # fmt: skip
# Rooms of `runtime` and of the plugins, from the bottom up: each may import those before it. The
# first ones of the plugins are modules.
RUNTIME_ROOMS = ("options", "reliability", "record", "exchange", "checkpoint", "planning",
                 "extensions", "loop", "asynchronous")  # fmt: skip
KERAS_ROOMS = ("env", "service", "activity", "rows", "cluster", "compat", "exchange", "data",
               "step", "exactness", "reliability")  # fmt: skip
MXNET_ROOMS = ("env", "fence", "parameters", "compat", "cluster", "reliability", "store",
               "data", "module", "layers", "trainer", "estimator", "asynchronous")  # fmt: skip
MAY_IMPORT: dict[str, frozenset[str]] = {
    "_version": frozenset(),
    "types": frozenset({"validate"}),
    "validate": frozenset(),
    "files": frozenset(),
    "installation": frozenset(),
    "measure": FOUNDATION,
    "resources": FOUNDATION,
    "order": FOUNDATION | {"cost", "allocation", "work"},
    "work": FOUNDATION | {"cost", "allocation"},
    "sampled_order": FOUNDATION | {"order"},
    "cost": FOUNDATION,
    "predict": FOUNDATION | {"cost", "measure"},
    "_selection": FOUNDATION | {"cost"},
    "allocation": FOUNDATION | {"cost", "_selection"},
    "policy": FOUNDATION | {"cost", "allocation"},
    "reserve": FOUNDATION | {"policy"},
    "sync": FOUNDATION | {"cost", "policy"},
    "registry": STAGES,
    "runtime": frozenset(),
    "sim": STAGES | {"registry", "runtime"},
    "processes": FOUNDATION,
    "launch": STAGES | {"processes", "runtime.reliability.exit", "runtime.reliability.marks"},
    "profiler": STAGES | {"processes"},
    "report": STAGES | {"runtime.record", "sim", "profiler"},
    "doctor": STAGES | {"registry", "runtime", "launch"},
    "demo": STAGES | {"registry", "runtime", "launch", "report"},
    "testing": STAGES | {"registry", "runtime", "sim"},
    "cli": STAGES
    | {"registry", "runtime", "sim", "launch", "profiler", "processes", "report", "demo", "doctor"},
    "__main__": frozenset({"cli"}),
    "__init__": frozenset({"_version"}),  # names of the face are imported on first use
    "lbbsp_tf": STAGES | {"runtime", "doctor.finding"},
    "lbbsp_mx": STAGES | {"runtime", "doctor.finding"},
    **{
        f"{plugin}.{room}": STAGES | {"runtime", *(f"{plugin}.{each}" for each in rooms[:i])}
        for plugin, rooms in (("lbbsp_tf", KERAS_ROOMS), ("lbbsp_mx", MXNET_ROOMS))
        for i, room in enumerate(rooms)
    },
    **{
        f"runtime.{room}": STAGES | {"registry", *(f"runtime.{each}" for each in RUNTIME_ROOMS[:i])}
        for i, room in enumerate(RUNTIME_ROOMS)
    },
}
# The demos of the plugins share the data set and the options of `lbbsp_core.demo`.
EXCEPTIONS = {"lbbsp_tf/demo.py": "demo", "lbbsp_mx/demo.py": "demo"}

# Rooms whose classes are known by their protocol only, outside the file that defines them; and the
# names that plugins leave to the session, which times, samples and records.
OPEN_FAMILIES = ("policy", "sync", "predict", "resources")
SESSION_NAMES = frozenset({"BusyTimer", "ResourceSampler", "RunRecord"})


class Source(NamedTuple):
    """A parsed file."""

    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """Name of the smallest room in the table that the file belongs to."""
        rooms = _rooms_of(".".join(self.path.with_suffix("").parts))
        return next((room for room in reversed(rooms) if room in MAY_IMPORT), rooms[0])

    @property
    def plugin(self) -> str | None:
        """Name of the plugin that the file belongs to, if any."""
        return self.path.parts[0] if self.path.parts[0] in PLUGINS else None

    @property
    def package(self) -> tuple[str, ...]:
        """Package that relative imports start from."""
        return self.path.parent.parts

    def at(self, node: ast.AST) -> str:
        """Returns the place of a node, as editors and terminals link to it."""
        return f"{self.path}:{getattr(node, 'lineno', 0)}"


class Import(NamedTuple):
    """One imported module or name, and where."""

    source: Source
    node: ast.AST
    module: str

    def __str__(self) -> str:
        return f"{self.source.at(self.node)}: {self.source.room} imports {self.module}"


@functools.cache
def sources() -> tuple[Source, ...]:
    """Parses all files of the three packages."""
    files = [
        path
        for package in ("lbbsp_core", *sorted(PLUGINS))
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    return tuple(
        Source(path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8")))
        for path in files
    )


@functools.cache
def imports(source: Source) -> tuple[Import, ...]:
    """Returns what a file imports, at its top and inside functions, with names resolved.

    ``from lbbsp_core import Affine`` counts as an import of the module that defines `Affine`.
    """
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found += [Import(source, node, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                depth = len(source.package) - node.level + 1
                base = ".".join([*source.package[:depth], *filter(None, [node.module])])
            modules = [_defining_module(base, alias.name) for alias in node.names]
            found += [Import(source, node, module) for module in modules]
    return tuple(found)


def _defining_module(base: str, name: str) -> str:
    if base == "lbbsp_core":
        value = getattr(importlib.import_module(base), name, None)
        return str(getattr(value, "__module__", base)) if value is not None else f"{base}.{name}"
    return f"{base}.{name}"


def _rooms_of(module: str) -> list[str]:
    """Returns the rooms that hold one of our modules, the largest first; none for other modules."""
    parts = module.split(".")
    if parts[0] == "lbbsp_core":
        parts = parts[1:]
    elif parts[0] not in PLUGINS:
        return []
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _concrete(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases}
            if not bases & {"Protocol", "ABC"}:
                yield node.name


@functools.cache
def concrete_classes() -> dict[str, Path]:
    """Returns the concrete classes of the open families, with the files that define them."""
    return {
        name: source.path
        for source in sources()
        if source.room in OPEN_FAMILIES
        for name in _concrete(source.tree)
    }


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} | {
        part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)
    }


def _tested_classes(source: Source) -> Iterator[tuple[ast.AST, set[str]]]:
    """Yields the names in class tests: `isinstance`, `issubclass`, `match` and ``type(x) is C``.

    A constant of the module, such as a tuple of classes, counts as the names that it is built of.
    """
    constants = {
        target.id: _names(node.value)
        for node in source.tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(source.tree):
        tested: ast.AST | None = None
        if isinstance(node, ast.Call) and len(node.args) == 2:
            if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
                tested = node.args[1]
        elif isinstance(node, ast.MatchClass):
            tested = node.cls
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
            tested = node.comparators[0]
        if tested is not None:
            names = _names(tested)
            yield node, names.union(*(constants.get(name, set()) for name in names))


def test_each_room_is_in_the_table():
    rooms = {source.room for source in sources()}
    unknown = rooms - set(MAY_IMPORT)
    assert not unknown, f"add {sorted(unknown)} to MAY_IMPORT and to docs/design.md"


def test_arrows_point_one_way():
    against = []
    for source in sources():
        room, may_import = source.room, MAY_IMPORT[source.room]
        allowed = may_import | {room, EXCEPTIONS.get(source.path.as_posix(), room)}
        against += [
            f"{found}, but may import {sorted(may_import)} only"
            for found in imports(source)
            if (targets := _rooms_of(found.module)) and allowed.isdisjoint(targets)
        ]
    assert not against, "\n".join(against)


def test_folders_of_tests_mirror_the_code():
    folders = {path.name for path in (ROOT / "tests" / "core").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} <= set(MAY_IMPORT)


def test_the_table_has_no_cycle():
    arrows = {
        room: {target if target in MAY_IMPORT else target.split(".")[0] for target in targets}
        for room, targets in MAY_IMPORT.items()
    }
    TopologicalSorter(arrows).prepare()  # raises an error that names the cycle


def test_files_import_each_other_in_no_circle():
    """Also not for their types only. Packages, which collect names of their files, do not count."""
    files = [".".join(each.path.with_suffix("").parts) for each in sources()]
    arrows = {
        name: {_file_of(found.module, files) or name for found in imports(source)} - {name}
        for name, source in zip(files, sources(), strict=True)
        if not name.endswith("__init__")
    }
    TopologicalSorter(arrows).prepare()  # raises an error that names the circle


def _file_of(module: str, files: Collection[str]) -> str | None:
    """Returns the file that defines a module or a name of it, if it is one of these."""
    return next((name for name in (module, module.rpartition(".")[0]) if name in files), None)


def test_files_and_functions_are_short():
    """Files up to 400 lines, functions up to 80 without their docstring."""
    for source in sources():
        assert len((ROOT / source.path).read_text("utf-8").splitlines()) <= 400, source.path
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                start = node.body[ast.get_docstring(node) is not None :][:1] or node.body
                header = node.body[0].lineno - node.lineno
                assert header + node.end_lineno - start[0].lineno < 80, source.at(node)


def test_the_core_imports_no_framework_and_plugins_not_each_other():
    found = [
        str(found)
        for source in sources()
        for found in imports(source)
        if found.module.split(".")[0]
        in (PLUGINS - {source.plugin} if source.plugin else FRAMEWORKS | PLUGINS)
    ]
    assert not found, "\n".join(found)


def test_open_protocols_stay_open():
    classes = concrete_classes()
    assert {"LoadBalanced", "SSP", "Ema", "ResourceSampler"} <= set(classes)  # the walk found them
    found = [
        f"{source.at(node)}: tests for {name} of {classes[name]}"
        for source in sources()
        for node, names in _tested_classes(source)
        for name in sorted(names)
        if name in classes and classes[name] != source.path
    ]
    message = "what a caller must know is an attribute of the protocol, not a class:\n"
    assert not found, message + "\n".join(found)


def test_plugins_leave_timing_sampling_and_recording_to_the_session():
    found = [
        f"{source.path}: {name}"
        for source in sources()
        if source.plugin
        for name in (_names(source.tree) | _imported(source.tree)) & SESSION_NAMES
    ]
    message = "use lbbsp_core.runtime.loop.session.WorkerSession instead of:\n"
    assert not found, message + "\n".join(found)


def _imported(tree: ast.Module) -> set[str]:
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {alias.name for node in froms for alias in node.names}
