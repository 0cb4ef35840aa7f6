"""End of a worker: orderly, or at once if its script has failed."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import atexit, sys
from lbbsp_core.runtime.reliability.exit import fail_fast, on_exit
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
        ("try: sys.exit(0)\nexcept SystemExit as error: error.code = 4; raise", 4, ""),
        ("raise KeyError('no data')", 1, "KeyError: 'no data'"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("sys.excepthook = lambda *_: sys.stderr.write('own hook')\n1 / 0", 1, "own hook"),
        ("sys.excepthook = lambda *_: None\nraise KeyboardInterrupt", 130, ""),
        ("sys.excepthook = lambda *_: 1 / 0\nfail_fast()\nraise KeyError", 1, ""),
        (
            "before = sys.excepthook\nsys.excepthook = lambda *each: before(*each)\nfail_fast()\n"
            "1 / 0",
            1,
            "ZeroDivisionError: division by zero\n",
        ),
    ],
)
def test_a_script_that_fails_ends_at_once(end, status, said):
    found, printed, errors = ended(end)
    assert (found, printed) == (status, [])
    assert said in errors


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("pass", []),
        ("end_now(3)", []),
        ("sys.exit(143)", []),
        ("sys.exit(3)", ["told"]),
        ("1 / 0", ["told"]),
    ],
)
def test_what_must_be_cleaned_and_who_must_be_told(end, told):
    script = (
        "import sys\nfrom lbbsp_core.runtime.reliability.exit import *\n"
        "fail_fast()\non_exit(lambda: None)\n"
        "on_failure(lambda: 1 / 0)\non_failure(lambda: print('told'))\n"
        f"before_end(lambda: print('cleaned', flush=True))\n{end}"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert [word for word in done.stdout.split() if word == "told"] == told
    assert "cleaned" in done.stdout


def test_what_blocks_does_not_keep_a_process_from_its_end():
    script = (
        "import time\nfrom lbbsp_core.runtime.reliability.exit import *\n"
        "before_end(lambda: time.sleep(100))\nend_now(3)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 3


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("end_now(3, 'worker 1 is lost')", 3),
        ("fail_fast()\n1 / 0", 1),
        ("on_exit(lambda: 1 / 0)", 1),
    ],
)
def test_a_full_pipe_of_errors_does_not_either(end, status):
    script = (
        "import os\nfrom lbbsp_core.runtime.reliability.exit import *\nreader, writer = os.pipe()\n"
        "os.set_blocking(writer, False)\n"
        "try:\n    while True: os.write(writer, bytes(4096))\n"
        "except BlockingIOError: os.set_blocking(writer, True)\n"
        f"os.dup2(writer, 2)\n{end}"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == status


def test_the_last_word_is_heard_and_then_the_threads_that_tell_others():
    script = (
        "import threading, time\nfrom lbbsp_core.runtime.reliability.exit import *\n"
        "def tell():\n    time.sleep(2.5)\n    print('told', flush=True)\n"
        "threading.Thread(target=tell, daemon=True).start()\n"
        "end_now(3, 'worker 1 is lost', linger_seconds=5)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "told\n", "worker 1 is lost\n")


def test_the_end_of_the_script_does_not_overtake_an_end_for_a_reason():
    end = (
        "import threading, time\nfrom lbbsp_core.runtime.reliability import exit\n"
        "end = lambda: exit.end_now(143, 'all leave', linger_seconds=1)\n"
        "threading.Thread(target=end, daemon=True).start()\n"
        "while not exit._ending: time.sleep(0.01)"
    )
    assert ended(end) == (143, [], "all leave\n")


def test_a_messenger_that_keeps_the_interpreter_does_not_either():
    script = (
        "import ctypes, sys\nfrom lbbsp_core.runtime.reliability.exit import *\n"
        "on_exit(lambda: None)\n"
        "on_failure(lambda: ctypes.PyDLL(None).sleep(100))\nsys.exit(3)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode != 0


@pytest.mark.parametrize(
    "end",
    [
        "import threading; thread = threading.Thread(target=sys.exit, args=[3]); thread.start()",
        "try: sys.exit(3)\nexcept SystemExit: pass",
        "try: sys.exit(3)\nexcept SystemExit as error: assert error.code == 3",
    ],
)
def test_an_exit_that_does_not_end_the_script_is_no_failure(end):
    assert ended(end) == (0, ["left", "finalised"], "")


def test_a_fork_neither_cleans_nor_tells():
    script = (
        "import os, sys\nfrom lbbsp_core.runtime.reliability.exit import *\nfail_fast()\n"
        "on_failure(lambda: print('told'))\nbefore_end(lambda: print('cleaned', flush=True))\n"
        "if os.fork() == 0: 1 / 0\nos.wait()\nprint('waited', flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["waited", "cleaned"]


def test_a_failure_while_leaving_is_one_of_the_script():
    status, printed, errors = ended("pass", "raise OSError('gone')")
    assert (status, printed) == (1, ["left"])
    assert "OSError: gone" in errors
