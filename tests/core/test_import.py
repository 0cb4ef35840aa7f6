"""Imports load what they use, and work where POSIX signals and modules are missing."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from waits import HANG_SECONDS

import lbbsp_core

OURS = "import sys; print(*(each for each in sys.modules if each.startswith('lbbsp_core')))"
HEAVY = "import sys; print(*({each.split('.')[0] for each in sys.modules}))"

WITHOUT_POSIX = """
import signal, sys
for name in ("SIGKILL", "SIGSTOP", "SIGCONT", "SIGHUP", "pthread_sigmask"):
    delattr(signal, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
import lbbsp_core.sim
from lbbsp_core import *
assert allocate([Proportional(1.0), Proportional(3.0)], total=8).tolist() == [2, 6]
predictor = Ema(0.5)
assert predictor.predict(predictor.update(predictor.init(), Measurement(10, 1.0))) == 10.0
"""


def python(text: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("statement", "most"),
    [
        ("import lbbsp_core", 2),
        ("from lbbsp_core.types import Limits", 5),
        ("from lbbsp_core import Ema", 20),
    ],
)
def test_an_import_loads_what_it_uses(statement: str, most: int) -> None:
    loaded = python(f"{statement}; {OURS}")
    assert "lbbsp_core" in loaded
    assert len(loaded) <= most, loaded


def test_nothing_heavy_is_loaded() -> None:
    modules = "lbbsp_core.sim, lbbsp_core.cost.fitting"
    loaded = python(f"from lbbsp_core import *; import {modules}; {HEAVY}; {OURS}")
    heavy = {"scipy", "psutil", "statsmodels", "sklearn", "matplotlib", "typer", "rich"}
    own = {f"lbbsp_core.{each}" for each in ("launch", "profiler", "processes", "report", "cli")}
    assert "lbbsp_core.runtime.loop.session" in loaded
    assert not (heavy | own | {"tensorflow", "mxnet"}) & set(loaded)


def test_the_core_imports_without_posix() -> None:
    python(WITHOUT_POSIX)


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
