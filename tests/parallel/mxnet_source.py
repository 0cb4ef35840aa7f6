"""Copies of MXNet's own tests in which only the names of stores and trainers differ.

The tests come from a source tree of MXNet 1.9.1, which ``LBBSP_MXNET_SOURCE`` names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

UNIT, NIGHTLY = Path("tests/python/unittest"), Path("tests/nightly")

_NAMES = {
    "mx.kv.create()": "mx.kv.create('lbbsp_local')",
    "'local_allreduce_cpu'": "'lbbsp_local_allreduce_cpu'",
    "'device'": "'lbbsp_device'",
    "'teststore'": "'lbbsp'",
    "'dist_sync'": "'lbbsp_dist_sync'",
    "'dist_async'": "'lbbsp_dist_async'",
    "'dist_device_sync'": "'lbbsp_dist_device_sync'",
}

_REPAIRS = {
    "num_rows/2": "num_rows//2",  # fails with MXNet's own stores as well, in Python 3
    "mx.gpu(": "mx.cpu(",
}

_OF_TRAINERS = {"gluon.Trainer(": "lbbsp_mx.Trainer("}
"""Further names that differ in the tests of trainers."""

_NOSE = '''"""Names of the test framework nose, which no current Python runs."""

import functools

import pytest


def make_decorator(function):
    return functools.wraps(function)


def assert_raises(expected, function, *args, **kwargs):
    with pytest.raises(expected):
        function(*args, **kwargs)


def raises(*expected):
    def decorate(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            with pytest.raises(expected):
                function(*args, **kwargs)

        return run

    return decorate
'''


def source() -> Path | None:
    """Returns MXNet's source tree, or None if none is named."""
    named = os.environ.get("LBBSP_MXNET_SOURCE", "")
    return Path(named) if named else None


def copy(tree: Path, folder: Path, tests: Sequence[Path]) -> list[Path]:
    """Copies tests and what they import to a folder, and returns the copied tests."""
    (folder / "nose").mkdir()
    (folder / "nose/__init__.py").write_text("")
    (folder / "nose/tools.py").write_text(_NOSE)
    for helper in (UNIT / "common.py", Path("tests/python/common/models.py")):
        (folder / helper.name).write_text((tree / helper).read_text())
    # The nightly tests import a function of another test of this name.
    expected = (tree / NIGHTLY / "test_kvstore.py").read_text()
    start = expected.index("def compute_expected_2bit_quantization")
    end = expected.index("\n## individual key interface", start)
    (folder / "nightly").mkdir()
    (folder / "nightly/test_kvstore.py").write_text(f"import numpy as np\n{expected[start:end]}")
    copies = [folder / ("nightly" if test.parent == NIGHTLY else "") / test.name for test in tests]
    for test, written in zip(tests, copies, strict=True):
        text = (tree / test).read_text()
        trainers = _OF_TRAINERS if "trainer" in test.name else {}
        for old, new in {**_NAMES, **_REPAIRS, **trainers}.items():
            text = text.replace(old, new)
        written.write_text(f"import lbbsp_mx\n{text}")
    return copies
