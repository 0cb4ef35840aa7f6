"""Without this users copy code and commands from the documents that do not run.

A block of Python runs in the namespace of its document. A comment before a block says what else it
needs: ``<!-- set-up: NAME -->`` fills the namespace by ``documents/scripts/NAME_setup.py``, that of
Keras in a process of its own; ``<!-- not run: REASON -->`` excepts the block. Commands of ``lbbsp``
are parsed, and run where that is cheap; targets of make, extras of pip and scripts must exist.
"""

from __future__ import annotations

import configparser
import functools
import json
import logging
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import commands
import pytest
from doc_pages import ROOT, Block, Page, documents
from report_runs import header, line, save
from typer.testing import CliRunner
from waits import HANG_SECONDS

from lbbsp_core.cli.app import application
from lbbsp_core.runtime.record.record import Run

SCRIPT = Path(__file__).parent / "documents" / "scripts" / "run_blocks.py"
RUN_ELSEWHERE = {"docs/adding-a-framework.md": "tests/core/runtime/test_toy_plugin.py"}
MAX_EXCEPTED = 6
STEPS = 20
TEXT = {"text", "diff", "dockerfile", "bibtex"}
"""Languages of blocks that are read, not run: outputs, formulas, changes of files."""

BLOCKS = [block for path in documents() for block in Page(path).blocks]


def chosen(*languages):
    """Parametrises a test by the blocks in one of these languages."""
    found = [block for block in BLOCKS if block.language in languages and not block.reason]
    return pytest.mark.parametrize("block", found, ids=[block.place for block in found])


def python_blocks(set_up):
    """Returns the blocks of Python with this set-up."""
    return [
        block
        for block in BLOCKS
        if block.language == "python" and block.set_up == set_up and not block.reason
        if block.document not in RUN_ELSEWHERE
    ]


@functools.cache
def outcomes(set_up: str, folder: Path) -> dict[Block, str]:
    """Runs all blocks of a set-up in one process; returns the traceback of each, or ""."""
    blocks = python_blocks(set_up)
    process = subprocess.run(
        [sys.executable, SCRIPT, set_up],
        input=json.dumps([(block.document, block.line, block.text) for block in blocks]),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert process.returncode == 0, process.stderr
    return dict(zip(blocks, json.loads(process.stdout.splitlines()[-1]), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with the files that commands of the documents name."""
    path = tmp_path_factory.mktemp("documents")
    record_trace(path / "trace.csv")
    (path / "traces").symlink_to(ROOT / "traces")
    [own] = [block.text for block in BLOCKS if block.reason.endswith("mine.py")]
    (path / "mine.py").write_text(own, encoding="utf-8")
    lines = [line(step, (4, 4), (0.1, 0.2), 0.21) for step in range(STEPS)]
    for name in ("plain", "even", "balanced"):
        save(path / "runs" / name, Run(header(2, 8, policy="Even()"), lines))
    return path


def record_trace(path):
    """Writes the first steps of a recorded trace."""
    header, *rows = (ROOT / "traces" / "job_replayed_bsp.csv").read_text("utf-8").splitlines()
    first = [row for row in rows if int(row.split(",")[1]) <= STEPS]
    path.write_text("\n".join([header, *first]) + "\n", encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("block", python_blocks("keras"), ids=lambda block: block.place)
def test_python_of_keras_runs(block, folder):
    """The set-up patches Keras, and thus has a process of its own."""
    failure = outcomes("keras", folder)[block]
    assert not failure, failure


@pytest.fixture
def log_level():
    """Restores the level of our loggers, which a document changes."""
    logger = logging.getLogger("lbbsp")
    level = logger.level
    yield
    logger.setLevel(level)


@functools.cache
def namespace_of(document, set_up):
    """Returns the namespace of a document, filled by its set-up."""
    namespace = {"__name__": "document"}
    if set_up:
        exec(SCRIPT.with_name(f"{set_up}_setup.py").read_text("utf-8"), namespace)
    return namespace


NEEDS_MXNET = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("mxnet") is None, reason="needs mxnet: pip install 'lbbsp[mx]'"),
]
GLUON = [pytest.param(block, marks=NEEDS_MXNET) for block in python_blocks("gluon")]


@pytest.mark.parametrize("block", [*python_blocks(""), *GLUON], ids=lambda block: block.place)
def test_python_runs(block, folder, monkeypatch, log_level):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    namespace = namespace_of(block.document, block.set_up)
    exec(compile("\n" * (block.line - 1) + block.text, block.document, "exec"), namespace)


@chosen("sh", "bash", "console")
def test_commands_exist(block, folder, monkeypatch):
    monkeypatch.chdir(folder)
    text = block.text
    if block.language == "console":
        typed = [line for line in text.splitlines() if line.startswith("$ ")]
        text = "\n".join(line.removeprefix("$ ") for line in typed)
    elif shutil.which("bash"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=HANG_SECONDS)
    for command in commands.commands(text):
        commands.check(command)


@chosen("json", "toml", "yaml", "ini")
def test_files_can_be_read(block):
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "toml":
        commands.tomllib.loads(block.text)
    elif block.language == "ini":
        configparser.ConfigParser(allow_no_value=True).read_string(block.text)
    else:
        list(pytest.importorskip("yaml").safe_load_all(block.text))


def test_each_block_is_run_or_says_why_not():
    known = {"python", "sh", "bash", "console", "json", "toml", "yaml", "ini"} | TEXT
    unknown = [f"{b.place}: {b.language!r}" for b in BLOCKS if b.language not in known]
    assert not unknown, f"name a language of {sorted(known)} behind the fence: {unknown}"
    assert {b.set_up for b in BLOCKS} <= {"", "keras", "gluon"}
    excepted = [b.place for b in BLOCKS if b.reason]
    assert len(excepted) <= MAX_EXCEPTED, excepted


def test_the_first_command_of_the_readme_prints_what_is_shown(monkeypatch):
    readme = [block for block in BLOCKS if block.document == "README.md"]
    [command] = [line for b in readme for line in b.text.splitlines() if "--scenario" in line]
    [shown] = [block.text.splitlines() for block in readme if block.language == "text"]
    monkeypatch.setenv("COLUMNS", "80")
    printed = CliRunner().invoke(application(), command.split()[1:]).output
    lines = [line.replace("\u2503", "\u2502") for line in printed.splitlines()]
    assert [line for line in shown if line not in lines] == []


@pytest.mark.parametrize(("sign", "example"), [("-", "plain"), ("+", "balanced")])
def test_the_change_in_the_readme_is_that_of_the_example(sign, example):
    [change] = [b.text for b in BLOCKS if (b.document, b.language) == ("README.md", "diff")]
    shown = [line[1:].strip() for line in change.splitlines() if line[0] in (sign, " ")]
    script = (ROOT / "examples" / f"keras_digits_{example}.py").read_text("utf-8")
    lines = [line.strip() for line in script.splitlines()]
    assert [each for each in shown if each not in (*lines, "...")] == []


@pytest.mark.parametrize(
    "command",
    [
        "lbbsp launch -n 2 --no-such-option train.py",
        "lbbsp launch -n 2 --speeds 1,1,0.5 train.py > file",
        "lbbsp evaluate trace.csv --predictors no_such_predictor",
        "make demo no-such-target",
        "A=1 pip install 'lbbsp[mx,no-such-extra]'",
        "python benchmarks/no_such_script.py | tail",
        "docker build --file examples/cluster/NoSuchFile .",
    ],
)
def test_a_wrong_command_is_found(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    [words] = list(commands.commands(command))[:1]
    with pytest.raises(AssertionError):
        commands.check(words)
