"""Scripts and modules that a job cannot run are refused before any process is started."""

import os
import sys
from pathlib import Path

import pytest

from lbbsp_core.launch import launch
from lbbsp_core.launch.script import check_command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to be in, with scripts and packages whose import would fail."""
    monkeypatch.chdir(tmp_path)
    files = {
        "train.py": "",
        "train.txt": "",
        "without_suffix": "",
        "package/__init__.py": "raise RuntimeError('imported')",
        "package/training.py": "",
        "package/runs/__init__.py": "",
        "package/runs/__main__.py": "",
        "plain/module.py": "",
        "plain/inner/deep/module.py": "raise RuntimeError('imported')",
        "plain/inner/runs/__main__.py": "",
        "extended/__init__.py": "__path__.append('elsewhere')",
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
        ["-m", "package.runs"],
        ["-m", "plain.module"],  # of a namespace package
        ["-m", "plain.inner.deep.module"],  # of nested ones
        ["-m", "plain.inner.runs"],
        ["-m", "extended.module"],  # only the code of the package knows where that is
        ["-m", "my-script"],
        ["-m", "2024-runs.go"],
        ["-m", "timeit"],
        ["-m", "this"],
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
        (["train"], ["did you mean 'train.py'?"]),
        (["other.py"], ["no script 'other.py' in '", "correct the path"]),
        (["none/train.py"], ["no folder 'none'", "correct the path"]),
        (["package.training"], ["did you mean -m package.training?"]),
        (["python3", "train.py"], ["name the script alone, which this Python runs"]),
        ([sys.executable, "train.py"], ["compiled program", "name the script alone"]),
        (["package"], ["folder without __main__.py", "such as training.py"]),
        (["-"], ["standard input", "write the script to a file"]),
        (["-m"], ["-m needs the name of a module", "''"]),
        (["-m", "train.py"], ["got the file 'train.py'", "omit .py, or omit -m"]),
        (["-m", "./train.py"], ["'./train.py'", "omit -m to run a file"]),
        (["-m", "trian"], ["no module 'trian' (did you mean train?)", "current directory"]),
        (["-m", "package.trainin"], ["(did you mean package.training?)"]),
        (["-m", "none.module"], ["no module 'none'", "install its package"]),
        (["-m", "train.step"], ["'train' is a file and not a package"]),
        (["-m", "my-scrpt"], ["no module 'my-scrpt' (did you mean my-script?)"]),
        (["-m", "2024-rusn.go"], ["(did you mean 2024-runs?)"]),
        (["-m", "plain/module"], ["-m needs the name of a module", "got 'plain/module'"]),
        (["-m", "..plain"], ["-m needs the name of a module", "got '..plain'"]),
        (["2024-runs.go"], ["did you mean -m 2024-runs.go?"]),
        (["-m", "plian.module"], ["(did you mean plain?)"]),
        (["-m", "plain.iner.deep"], ["no module 'plain.iner' (did you mean plain.inner?)"]),
        (["-m", "plain.inner.deep.modul"], ["(did you mean plain.inner.deep.module?)"]),
        (["-m", "plain.inner.deep"], ["without a module __main__", "as plain.inner.deep.module"]),
        (["plain.inner.deep.module"], ["did you mean -m plain.inner.deep.module?"]),
        (["-m", "package"], ["without a module __main__", "such as package.runs"]),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(folder, command, words):
    with pytest.raises(ValueError) as error:
        check_command(command)
    for word in words:
        assert word in str(error.value)
    assert "package" not in sys.modules


def test_a_file_without_permission_is_refused(folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "train.py")
    with pytest.raises(ValueError, match=r"'train.py' cannot be read: .* chmod \+r"):
        check_command(["train.py"])


def test_a_missing_script_starts_and_creates_nothing(folder):
    with pytest.raises(ValueError, match=r"did you mean 'train\.py'"):
        launch(["trian.py"], workers=3, run_dir=folder / "runs")
    with pytest.raises(ValueError, match="no module 'trian'"):
        launch(["-m", "trian"], workers=3, run_dir=folder / "runs")
    assert not (folder / "runs").exists()
