"""Settings that all tests share."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import settings

# Threads of BLAS gain nothing on our small matrices, and on a busy machine they spin: the fits of
# ARIMA take three times the CPU time then. NumPy reads the variable when it is first imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

settings.register_profile("lbbsp", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("lbbsp")


@pytest.fixture
def writes_each(monkeypatch):
    """Makes every checkpoint due be written: no write is skipped while another one is running."""
    from lbbsp_core.runtime.checkpoint_writer import CheckpointWriter  # not before the variable

    def is_busy(writer):
        writer.flush()
        return False

    monkeypatch.setattr(CheckpointWriter, "is_busy", property(is_busy))


@pytest.fixture
def until():
    """Returns a function that waits until a condition holds, for half a minute at most."""

    def wait(condition):
        deadline = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert condition()

    return wait
