"""Import without MXNet, on a Python that has it and on one that does not."""

import subprocess
import sys

import pytest
from waits import HANG_SECONDS

SCRIPT = """
import sys
import numpy, psutil, scipy.optimize
sys.modules["mxnet"] = None
sys.version_info = {version}
import lbbsp_mx
"""


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ((3, 12, 1), "mxnet is not installed: pip install 'lbbsp[mx]' (Linux on x86-64)"),
        (
            (3, 13, 0),
            "mxnet is not installed: MXNet 1.9.1 needs NumPy 1, which Python 3.13 does not have; "
            "create a virtual environment with Python 3.10 to 3.12, and run "
            "pip install 'lbbsp[mx]' there",
        ),
    ],
)
def test_the_remedy_depends_on_the_python(version, remedy):
    script = SCRIPT.format(version=version)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {remedy}"
