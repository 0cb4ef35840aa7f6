"""Import without MXNet, on a Python that has it and on one that does not."""

import subprocess
import sys

from waits import HANG_SECONDS

from lbbsp_core.installation import extra

SCRIPT = """
import sys
import numpy, psutil, scipy.optimize
sys.modules["mxnet"] = None
for sys.version_info in (3, 12, 1), (3, 13, 0):
    try:
        import lbbsp_mx
    except ModuleNotFoundError as error:
        print(error)
"""


def test_the_remedy_depends_on_the_python():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True,
                          timeout=HANG_SECONDS)  # fmt: skip
    assert done.stdout.splitlines() == [
        f"mxnet is not installed: pip install {extra('mx')} (Linux on x86-64)",
        "mxnet is not installed: MXNet 1.9.1 needs NumPy 1, which Python 3.13 does not have; "
        "create a virtual environment with Python 3.10 to 3.12, and run "
        f"pip install {extra('mx')} there",
    ], done.stderr
