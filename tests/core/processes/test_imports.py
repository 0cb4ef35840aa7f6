"""Imports of the process packages: their direction; the core on systems without POSIX."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from waits import HANG_SECONDS

import lbbsp_core.processes

# Imports the packages once for their third-party dependencies, which adapt to the system by
# themselves, and then again without what Windows lacks.
WITHOUT_POSIX = """
import importlib, os, signal, sys

def load():
    for name in ("processes", "launch", "profiler"):
        importlib.import_module(f"lbbsp_core.{name}")
    for name in ("child", "_exec", "_reaper"):
        importlib.import_module(f"lbbsp_core.processes.{name}")

load()
for name in [name for name in sys.modules if name.split(".")[0] == "lbbsp_core"]:
    del sys.modules[name]
on_windows = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM"}
for name in [name for name in dir(signal) if name.startswith("SIG") and name[3] != "_"]:
    if name not in on_windows:
        delattr(signal, name)
del signal.pthread_sigmask
for name in ("P_PID", "WEXITED", "WNOHANG", "WNOWAIT", "fork", "getpgid", "killpg",
             "sched_getaffinity", "setsid", "waitid"):
    delattr(os, name)
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
load()
import lbbsp_core.sim
from lbbsp_core import *
assert allocate([Proportional(1.0), Proportional(3.0)], total=8).tolist() == [2, 6]
predictor = Ema(0.5)
assert predictor.predict(predictor.update(predictor.init(), Measurement(10, 1.0))) == 10.0
print("imported")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="removes names that Linux defines")
def test_the_core_imports_without_posix():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.stdout == "imported\n", done.stderr


def imports(path: Path) -> set[str]:
    """Returns the modules that a file imports, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def sources() -> list[Path]:
    return sorted(Path(lbbsp_core.processes.__file__).parent.glob("*.py"))


def test_processes_imports_no_other_package_of_ours():
    names = {name for path in sources() for name in imports(path)}
    ours = {name for name in names if name.startswith("lbbsp_core")}
    assert ours
    assert all(name.startswith("lbbsp_core.processes.") for name in ours)


@pytest.mark.parametrize("name", ["_exec.py", "_reaper.py"])
def test_programs_import_only_the_standard_library(name):
    [path] = [path for path in sources() if path.name == name]
    assert {module.split(".")[0] for module in imports(path)} <= sys.stdlib_module_names
