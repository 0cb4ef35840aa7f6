"""Without this a file that is loaded may execute code, or show others what the umask hides.

This is what docs/security.md promises; what listens is tested with the jobs that run.
"""

import ast
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from report_runs import header, save

from lbbsp_core.cli.options import write_figures
from lbbsp_core.cost.profile_file import write_document
from lbbsp_core.runtime.checkpoint.checkpoint import Checkpoint, write_checkpoint
from lbbsp_core.runtime.record.record import Run

ROOT = Path(__file__).parents[1]
FILES = [path for name in ("lbbsp_core", "lbbsp_tf", "lbbsp_mx")
         for path in sorted((ROOT / name).rglob("*.py"))]  # fmt: skip

EXECUTES_DATA = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
"""Modules that can execute what they read."""

PRIVATE = {"mkstemp", "NamedTemporaryFile", "chmod", "fchmod"}
"""Functions that give a file another mode than the umask of the user."""

EXCEPTIONS = {
    ("lbbsp_mx/server.py", "pickle"),  # optimizers, as MXNet's workers send them to its servers
    ("lbbsp_tf/exactness/agreement.py", "marshal"),  # own lambdas, as Keras describes them
    ("lbbsp_core/testing/_contract.py", "pickle"),  # copies an object of the test that calls it
}


def used(text):
    """Yields the modules and functions that a file imports or calls by these names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call):
            yield getattr(node.func, "id", getattr(node.func, "attr", ""))
            flags = {each.arg: each.value for each in node.keywords}
            yield from (f"{name}=True" for name, value in flags.items()
                        if isinstance(value, ast.Constant) and value.value is True)  # fmt: skip


def test_nothing_that_is_loaded_is_executed_and_files_have_the_mode_of_the_umask():
    names = EXECUTES_DATA | PRIVATE | {"eval", "exec", "allow_pickle=True", "load_model"}
    words = re.compile(rf"\b({'|'.join(names)})\b".replace("=True", ""))
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in FILES
        if words.search(text := path.read_text("utf-8"))
        for name in names.intersection(used(text))
    }
    assert found <= EXCEPTIONS, sorted(found - EXCEPTIONS)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: save(folder, Run(header(1, 1), [])),
        lambda folder: write_checkpoint(folder, Checkpoint(1, arrays={"x": np.zeros(3)})),
        lambda folder: write_document(folder / "profile.json", {}),
        lambda folder: write_figures(folder / "figures.json", {}),
    ],
)
@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o027, 0o640), (0o002, 0o664)])
def test_files_have_the_mode_of_the_umask(tmp_path, write, umask, mode):
    before = os.umask(umask)
    try:
        write(tmp_path)
    finally:
        os.umask(before)
    [path] = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == mode
