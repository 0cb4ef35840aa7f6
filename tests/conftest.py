"""Settings that all tests share."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

# Threads of BLAS gain nothing on our small matrices, and on a busy machine they spin: the fits of
# ARIMA take three times the CPU time then. NumPy reads the variable when it is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]
JOBS = "tests/parallel/"


def pytest_collection_modifyitems(items):
    """Starts with what takes longest, so that no process is left with it at the end."""
    starts = "tests/test_gpu_checks.py", "tests/examples/", JOBS
    items.sort(key=lambda item: [not item.nodeid.startswith(start) for start in starts])  # stable


def pytest_collection_finish():
    """Spares the garbage collector what imports have left: each loader of gluon calls it."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keeps the tests of a file, and of files that share clusters, in one process."""
    from xdist.scheduler import LoadScopeScheduling

    @cache
    def group(file):
        if not file.startswith(JOBS) or "clusters.run" not in (ROOT / file).read_text("utf-8"):
            return file
        return "mxnet" if "test_mx" in file else "keras"

    class ByCluster(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group(nodeid.partition("::")[0])

    return ByCluster(config, log)


settings.register_profile("lbbsp", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("lbbsp")


@pytest.fixture
def writes_each(monkeypatch):
    """Makes every checkpoint due be written: no write is skipped while another one is running."""
    # Not before the variable.
    from lbbsp_core.runtime.loop.checkpoint_schedule import CheckpointWriter

    def is_busy(writer):
        writer.flush()
        return False

    monkeypatch.setattr(CheckpointWriter, "is_busy", property(is_busy))


@pytest.fixture
def patient(monkeypatch):
    """Lets files of metrics and records take their time, on a slow file system or machine."""
    from lbbsp_core.runtime.extensions import metrics_file
    from lbbsp_core.runtime.record import writer

    for module in (metrics_file, writer):
        monkeypatch.setattr(module, "_PATIENCE_SECONDS", 300)  # only ends what hangs


OWNER = """
import os, shutil, sys, time
from pathlib import Path
from lbbsp_core.runtime.loop.checkpoint_schedule import claim_folder
claim_folder(Path(sys.argv[1]))
shutil.copytree(sys.argv[1], sys.argv[1] + " copied")  # opens and closes the locked file
child = os.fork()  # as loaders of data do, which outlive a process that is killed
if not child:
    print(os.getpid(), flush=True)  # it has closed the file
time.sleep(300)  # only ends what hangs
"""


@pytest.fixture
def owned_folder(tmp_path):
    """Folder of checkpoints that a process on "the-host" has claimed, and that process."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "owned")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LBBSP_HOST": "the-host"},
    ) as owner:
        child = int(owner.stdout.readline())
        yield tmp_path / "owned", owner
        owner.kill()
        os.kill(child, signal.SIGKILL)
