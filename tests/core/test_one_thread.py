"""What a step computes stays on its thread: BLAS would let a thread spin on every core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import threading, time
from pathlib import Path
import numpy as np
from lbbsp_core import Measurement
from lbbsp_core.predict import Narx
from lbbsp_core.resources import FACTORS
from lbbsp_core.runtime.exchange.digest import Digest

def threads():
    return {each.name for each in Path("/proc/self/task").iterdir()}

def others():  # nanoseconds on a core (proc_pid_schedstat)
    own = str(threading.get_native_id())
    return sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0])
               for each in threads() - {own})

def state(thread):
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]

def settled():
    before = others()
    time.sleep(0.3)  # those of OpenBLAS spin when they have been started, for 0.1 s
    # On a busy machine one may have had no core for so long: it is runnable, and does not sleep.
    sleep = all(state(each) == "S" for each in threads() - {str(threading.get_native_id())})
    return sleep and others() == before

random = np.random.default_rng(0)
rows, narx = random.normal(size=(300, 90)), Narx(train_seconds=1e-9, train_interval=1)

def learn():
    state = narx.init()
    for _ in range(330):
        drivers = tuple(random.uniform(0, 100, len(FACTORS)))
        state = narx.update(state, Measurement(random.uniform(50, 100), 1.0, drivers))

work = {"narx": learn, "digest": lambda: Digest.of([np.ones(1 << 20, "f4")]),
        "product": lambda: [rows.T @ rows for _ in range(20)]}
while not settled():
    pass
before = others()
work[NAME]()
time.sleep(0.1)
print(others() - before, len(threads()))
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the kernel does not tell times of threads"
)


def time_of_others(name: str) -> tuple[int, int]:
    """Returns the CPU time of other threads while one computes, in ns, and the number of all."""
    script = f"NAME = {name!r}{SCRIPT}"
    env = {**os.environ, **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "4")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    nanoseconds, threads = map(int, done.stdout.split())
    return nanoseconds, threads


@pytest.mark.parametrize("name", ["narx", "digest"])
def test_no_other_thread_takes_part(name):
    assert time_of_others(name)[0] == 0


def test_the_measurement_sees_threads_of_blas():
    nanoseconds, threads = time_of_others("product")
    if threads == 1:
        pytest.skip("NumPy's BLAS has one thread here")
    assert nanoseconds > 0
