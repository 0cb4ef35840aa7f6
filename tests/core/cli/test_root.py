"""Options of the command itself: versions, completion, and how it is started."""

import os
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import lbbsp_core
import lbbsp_core.cli
from lbbsp_core.cli.app import application
from lbbsp_core.cli.completion import one_of, some_of
from lbbsp_core.cli.version import versions


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


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_package_too_says_what_it_needs(monkeypatch, capsys, missing):
    monkeypatch.setattr(lbbsp_core.cli, "find_spec", lambda name: None if name == missing else 1)
    assert start(monkeypatch, "--version") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "pip install 'lbbsp[cli]'" in line


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


def test_names_are_completed():
    assert one_of(["tensorflow", "mxnet"])("m") == ["mxnet"]
    assert one_of(["tensorflow", "mxnet"])("") == ["tensorflow", "mxnet"]
    complete = some_of(["bsp", "lbbsp", "lbbsp-every"])
    assert complete("l") == ["lbbsp", "lbbsp-every"]
    assert complete("lbbsp,") == ["lbbsp,bsp", "lbbsp,lbbsp-every"]
    assert complete("lbbsp:min_gain=0,b") == ["lbbsp:min_gain=0,bsp"]
    assert complete("x") == []


@pytest.mark.slow
def test_the_shell_is_answered():
    words = "lbbsp simulate --policies bsp,lb"
    done = subprocess.run(
        [sys.executable, "-m", "lbbsp_core"],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "_LBBSP_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": "3",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["bsp,lbbsp", "bsp,lbbsp-every"], done.stderr
