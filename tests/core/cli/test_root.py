"""Options of the command itself: versions, completion, and how it is started."""

import json
import os
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.main import get_command
from waits import HANG_SECONDS

import lbbsp_core
import lbbsp_core.cli
from lbbsp_core.cli.app import COMMANDS, application, versions
from lbbsp_core.installation import extra


def start(monkeypatch, *arguments):
    """Runs ``python -m lbbsp_core`` in this process, and returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["somewhere/__main__.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("lbbsp_core", run_name="__main__")
    return end.value.code


def test_the_package_is_the_command(monkeypatch, capsys):
    assert start(monkeypatch, "--version") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"lbbsp {lbbsp_core.__version__}",
        f"Python {'.'.join(map(str, sys.version_info[:3]))}",
    ]
    assert start(monkeypatch, "--help") == 0
    assert capsys.readouterr().out.strip().startswith("Usage: lbbsp [OPTIONS] COMMAND")


@pytest.mark.parametrize("missing", ["typer", "rich", "packaging"])
def test_without_its_packages_the_command_says_how_to_get_them(monkeypatch, capsys, missing):
    monkeypatch.setattr(lbbsp_core.cli, "find_spec", lambda name: None if name == missing else 1)
    assert start(monkeypatch, "--version") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"pip install {extra('cli')}" in line


WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None
from lbbsp_core.cli import main
main()
"""


@pytest.mark.parametrize("missing", ["psutil", "numpy"])
def test_without_what_lbbsp_needs_there_is_one_line_and_doctor_checks_the_rest(missing):
    def ends(*command):
        arguments = [sys.executable, "-c", WITHOUT, missing, *command]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=HANG_SECONDS)
        return done.returncode, done.stdout, done.stderr

    status, _, error = ends("launch", "train.py")
    assert (status, error.count("\n")) == (2, 1)
    assert missing in error
    assert error.endswith(f"pip install {extra('cli')}\n")
    status, output, error = ends("doctor", "--framework", "none", "--json", "-")
    found = json.loads(output)
    assert status == 1
    assert found["topics"]["versions"]
    assert [each["status"] for each in found["topics"]["machine"]] == ["problem"]
    assert extra("cli") in found["topics"]["machine"][0]["remedy"]


@pytest.mark.parametrize(
    ("error", "concerns"),
    [
        (ModuleNotFoundError("No module named 'psutil'", name="psutil"), True),
        (ImportError("numpy.core.multiarray failed to import"), True),
        (ModuleNotFoundError("No module named 'numpy_financial'", name="numpy_financial"), False),
        (ModuleNotFoundError("No module named 'scipy.none'", name="scipy.none"), False),
        (ModuleNotFoundError("statsmodels is missing: pip install '/numpy/lbbsp[arima]'"), False),
    ],
)
def test_only_what_lbbsp_itself_needs_is_its_fault(error, concerns):
    assert lbbsp_core.cli.is_of_requirement(error) == concerns


def test_versions_are_those_of_installed_frameworks(monkeypatch):
    installed = {
        "numpy": "2.1",
        "TensorFlow_CPU": "2.21",
        "tensorflow-estimator": "1",
        "mxnet-cu112": "1.9.1",
        "keras": "3.15",
        "kerastuner": "1",
        None: "of a broken installation",
    }
    found = [SimpleNamespace(name=name, version=text) for name, text in installed.items()]
    found.append(SimpleNamespace(name="numpy", version="1.0, shadowed on the path"))
    monkeypatch.setattr(metadata, "distributions", lambda: found)
    assert list(versions())[2:] == [
        ("keras", "3.15"),
        ("mxnet-cu112", "1.9.1"),
        ("numpy", "2.1"),
        ("tensorflow-cpu", "2.21"),
    ]


def test_errors_of_our_own_keep_pythons_traceback():
    assert application().pretty_exceptions_enable is False


def python(code, **variables):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **variables},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.stdout, done.stderr
    return done.stdout


def test_commands_are_loaded_when_they_are_chosen():
    run = "import sys; from typer.testing import CliRunner; import lbbsp_core.cli.app as app;"
    run += "print(CliRunner().invoke(app.application(), {}).output);"
    names = "lbbsp", "tensorflow", "keras", "mxnet", "sklearn", "matplotlib"
    run += f"print(*(each for each in sys.modules if each.startswith({names})))"
    shown = python(run.format(["--help"]))
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert "..." not in shown.partition("Commands:")[2], "lines are cut"
    assert len(shown.splitlines()[-1].split()) <= 4, "no command, and nothing that one needs"
    shown = python(run.format(["report", "--help"]))
    assert set(COMMANDS) & set(re.findall(r"lbbsp_core\.cli\.(\w+)", shown)) == {"report"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_shows_the_first_line_of_their_help(name):
    lazy = get_command(application()).commands[name]
    assert lazy.help == lazy.loaded.help.split("\n\n")[0].replace("\n", " ")


@pytest.mark.slow
def test_the_shell_is_answered():
    main = "import runpy; runpy.run_module('lbbsp_core', run_name='__main__')"

    def complete(words, position):
        shell = {"COMP_WORDS": words, "COMP_CWORD": position, "_LBBSP_COMPLETE": "complete_bash"}
        return python(main, **shell).split()

    assert "--policies" in complete("lbbsp simulate --po", "2")
    assert complete("lbbsp re", "1") == ["report"]
