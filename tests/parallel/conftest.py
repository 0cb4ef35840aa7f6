"""What all tests with jobs share: clusters, and a fast start of processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from jobs import Clusters
from waits import HANG_SECONDS

from lbbsp_core.launch import supervise

WITHOUT = Path(__file__).parent / "without"


@pytest.fixture(autouse=True, scope="session")
def patient_launcher() -> Iterator[None]:
    """Waits for the end of processes that were killed as long as a busy machine needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervise, "KILL_SECONDS", HANG_SECONDS)
        yield


@pytest.fixture(autouse=True, scope="module")
def fast_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leaves out what takes a third of the start of a process, unless the module needs it."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "NEEDS_SKLEARN", False):
            patch.setenv("PYTHONPATH", str(WITHOUT), prepend=os.pathsep)
        yield


@pytest.fixture(autouse=True, scope="module")
def long_silence() -> Iterator[None]:
    """Lets no process of MXNet count as lost because it is suspended for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LBBSP_SILENCE_SECONDS", f"{HANG_SECONDS:g}")
        yield


@pytest.fixture
def popen() -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts processes as `subprocess.Popen` does, whose output is text, and ends them."""
    with ExitStack() as stack:

        def start(command: Sequence[object], **options: object) -> subprocess.Popen:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen([*map(str, command)], **pipes, **options)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture(scope="session")
def clusters(patient_launcher: None) -> Iterator[Clusters]:
    """Clusters whose processes run the scripts of many tests in turn."""
    started = Clusters()
    yield started
    started.close()
