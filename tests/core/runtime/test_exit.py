"""End of a worker: orderly, or at once if its script has failed."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys
from lbbsp_core.runtime.exit import fail_fast, on_exit
atexit.register(print, "finalised")
fail_fast()
def leave():
    print("left")
    {leave}
on_exit(leave)
{end}
"""


def ended(end, leave="pass"):
    """Runs a script that ends by `end`; returns its status and what it printed."""
    script = SCRIPT.format(end=end, leave=leave)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout.split(), done.stderr


@pytest.mark.parametrize("end", ["pass", "sys.exit()", "sys.exit(0)"])
def test_a_script_that_ends_well_leaves(end):
    assert ended(end)[:2] == (0, ["left", "finalised"])


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data"),
        ("raise KeyError('no data')", 1, "KeyError: 'no data'"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_a_script_that_fails_ends_at_once(end, status, said):
    found, printed, errors = ended(end)
    assert (found, printed) == (status, [])
    assert said in errors


def test_a_failure_while_leaving_is_one_of_the_script():
    status, printed, errors = ended("pass", "raise OSError('gone')")
    assert (status, printed) == (1, ["left"])
    assert "OSError: gone" in errors
