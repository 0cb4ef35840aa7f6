"""Scripts and modules that a job cannot run are refused before any process is started."""

import os
import sys

import pytest

from lbbsp_core.launch import launch
from lbbsp_core.launch.script import check_command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to be in, with scripts and packages whose import would fail."""
    monkeypatch.chdir(tmp_path)
    files = {
        "train.py": "",
        "without_suffix": "",
        "package/__init__.py": "raise RuntimeError('imported')",
        "package/training.py": "",
        "plain/module.py": "",
        "archive/__main__.py": "",
        "my-script.py": "",
        "2024-runs/go.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "--epochs", "5"],
        ["./without_suffix"],
        ["archive"],  # Python runs its __main__.py
        ["-c", "pass"],
        ["-m", "train"],
        ["-m", "package.training", "--epochs", "5"],
        ["-m", "plain.module"],  # of a namespace package
        ["-m", "my-script"],
        ["-m", "2024-runs.go"],
        ["-m", "timeit"],
        ["-m", "sys"],
    ],
)
def test_what_python_runs_is_accepted(folder, command):
    check_command(command)
    assert not {"package", "plain"} & set(sys.modules)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["trian.py"], ["no script 'trian.py'", "did you mean 'train.py'?"]),
        (["./package/trainings.py"], ["did you mean 'package/training.py'?"]),
        (["other.py"], ["no script 'other.py' in '"]),
        (["none/train.py"], ["no script 'none/train.py'"]),
        (["python3", "train.py"], ["name the script, which this Python runs in every worker"]),
        ([sys.executable, "train.py"], ["compiled program", "name the script"]),
        (["package"], ["folder without __main__.py"]),
        (["-"], ["no input", "name the script"]),
        (["-m"], ["-m needs the name of a module", "''"]),
        (["-m", "train.py"], ["got 'train.py'", "omit -m to run a file"]),
        (["-m", "./train.py"], ["'./train.py'", "omit -m to run a file"]),
        (["-m", "..plain"], ["-m needs the name of a module", "got '..plain'"]),
        (["-m", "trian"], ["no module 'trian'", "current directory"]),
        (["-m", "none.module"], ["no module 'none'", "install its package"]),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(folder, command, words):
    with pytest.raises(ValueError) as error:
        check_command(command)
    for word in words:
        assert word in str(error.value)
    assert "package" not in sys.modules


def test_a_file_without_permission_is_refused(folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match=r"'train.py' cannot be read: run chmod \+r"):
        check_command(["train.py"])


def test_a_missing_script_starts_and_creates_nothing(folder):
    with pytest.raises(ValueError, match=r"did you mean 'train\.py'"):
        launch(["trian.py"], workers=3, run_dir=folder / "runs")
    assert not (folder / "runs").exists()
