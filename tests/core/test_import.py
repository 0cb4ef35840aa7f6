"""Imports load what they use, and type checkers see what there is."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from waits import HANG_SECONDS

import lbbsp_core

SMALL = {
    "import lbbsp_core": 2,
    "from lbbsp_core.types import Limits": 5,
    "from lbbsp_core import Ema": 20,
}
"""Imports, and how many of our modules are loaded at most by those up to each."""
ALL = "from lbbsp_core import *; import lbbsp_core.sim, lbbsp_core.cost.fitting"


def test_imports_load_what_they_use_and_nothing_heavy() -> None:
    lines = ["import sys", *(f"{each}; print(*sys.modules)" for each in (*SMALL, ALL))]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True, text=True, timeout=HANG_SECONDS, check=True,
    )  # fmt: skip
    *small, whole = map(str.split, done.stdout.splitlines())
    for loaded, most in zip(small, SMALL.values(), strict=True):
        ours = [each for each in loaded if each.startswith("lbbsp_core")]
        assert 0 < len(ours) <= most, ours
    heavy = {"scipy", "psutil", "statsmodels", "sklearn", "matplotlib", "typer", "rich"}
    own = {f"lbbsp_core.{each}" for each in ("launch", "profiler", "processes", "report", "cli")}
    assert "lbbsp_core.runtime.loop.session" in whole
    assert not (heavy | own | {"tensorflow", "mxnet"}) & set(whole)


def test_type_checkers_see_the_names_of_the_face() -> None:
    assert lbbsp_core.__file__ is not None
    stub = ast.parse(Path(lbbsp_core.__file__).with_suffix(".pyi").read_text("utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    shown = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}
    assert shown.keys() == {*lbbsp_core.__all__, "__version__"}
    assert shown.keys() <= set(dir(lbbsp_core))
    for name, (module, origin) in shown.items():
        assert name == origin
        assert getattr(importlib.import_module(str(module)), name) is getattr(lbbsp_core, name)
    with pytest.raises(AttributeError, match="module 'lbbsp_core' has no attribute 'Emma'"):
        _ = lbbsp_core.Emma  # type: ignore[attr-defined]
