"""End of a worker: orderly, or at once if its script has failed."""

import subprocess
import sys

import pytest
from waits import HANG_SECONDS

pytestmark = pytest.mark.slow

IMPORTS = """
import atexit, ctypes, faulthandler, os, sys, threading, time
from types import SimpleNamespace
from lbbsp_core.runtime.reliability import exit
from lbbsp_core.runtime.reliability.exit import *
"""

TRAINING = """
exit._PATIENCE_SECONDS = exit._SECOND_SECONDS = 300
atexit.register(print, "finalised")
fail_fast()
on_failure(lambda: 1 / 0)
on_failure(lambda: print("told"))
before_end(lambda: print("cleaned"))
on_exit(lambda: print("left"))
"""


def ended(script):
    """Runs a script; returns its status, the words it printed, and its errors."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + script],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    return done.returncode, done.stdout.split(), done.stderr


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit()",
        "sys.exit(0)",
        "threading.Thread(target=sys.exit, args=[3]).start()",
        "try: sys.exit(3)\nexcept SystemExit: pass",
        "try: sys.exit(3)\nexcept SystemExit as error: assert error.code == 3",
        # A fork neither tells nor cleans.
        "sys.stderr = open(os.devnull, 'w')\nif os.fork() == 0: 1 / 0\nassert os.wait()[1]",
    ],
)
def test_a_script_that_ends_well_leaves(end):
    assert ended(TRAINING + end) == (0, ["left", "cleaned", "finalised"], "")


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
        ("def gone(): raise OSError('gone')\non_exit(gone)", 1, "OSError: gone"),
    ],
)
def test_a_script_that_fails_tells_and_ends_at_once(end, status, said):
    found, printed, errors = ended(TRAINING + end)
    assert (found, printed) == (status, ["told", "cleaned"])
    assert said in errors


@pytest.mark.parametrize(("end", "status"), [("end_now(3)", 3), ("sys.exit(143)", 143)])
def test_an_end_that_is_no_failure_is_not_told(end, status):
    assert ended(TRAINING + end) == (status, ["cleaned"], "")


def test_the_end_of_the_script_does_not_overtake_an_end_for_a_reason():
    script = """
def wait(seconds):
    if seconds == 1:  # lingers until the script has ended, too
        while len(exit._ending) < 2:
            time.sleep(0.01)
        print("lingered", flush=True)
    else:
        time.sleep(seconds)
exit.time = SimpleNamespace(sleep=wait)
end = lambda: end_now(143, "all leave", linger_seconds=1)
threading.Thread(target=end, daemon=True).start()
while not exit._ending:
    time.sleep(0.01)
"""
    assert ended(TRAINING + script) == (143, ["lingered", "cleaned"], "all leave\n")


# Of the two that end a process, the other one may be first on a busy machine.
TIMER_ALONE = "faulthandler.dump_traceback_later = lambda *_, **__: None\n"
FAULTHANDLER_ALONE = "threading.Timer.start = lambda timer: None\n"
FULL_PIPE = """
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True: os.write(writer, bytes(4096))
except BlockingIOError: os.set_blocking(writer, True)
os.dup2(writer, 2)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (TIMER_ALONE + "before_end(lambda: time.sleep(10**6))\nend_now(3)", 3),
        (TIMER_ALONE + FULL_PIPE + "end_now(3, 'worker 1 is lost')", 3),
        (FULL_PIPE + "fail_fast()\n1 / 0", 1),
        (FULL_PIPE + "on_exit(lambda: 1 / 0)", 1),
        # What keeps the interpreter:
        (
            FAULTHANDLER_ALONE
            + "on_exit(lambda: None)\non_failure(lambda: ctypes.PyDLL(None).sleep(10**6))\n"
            "sys.exit(3)",
            1,
        ),
    ],
)
def test_what_blocks_does_not_keep_a_process_from_its_end(end, status):
    assert ended("exit._PATIENCE_SECONDS = 0.1\n" + end)[0] == status


def test_the_last_word_is_heard_and_then_the_threads_that_tell_others():
    script = """
lingers, told, sleep = threading.Event(), threading.Event(), time.sleep
def tell():
    lingers.wait()
    sleep(0.5)  # for longer than the patience
    print("told", flush=True)
    told.set()
def linger(seconds):
    lingers.set()
    told.wait(seconds)
threading.Thread(target=tell, daemon=True).start()
exit._PATIENCE_SECONDS, exit.time = 0.1, SimpleNamespace(sleep=linger)
end_now(3, "worker 1 is lost", linger_seconds=300)
"""
    assert ended(script) == (3, ["told"], "worker 1 is lost\n")
