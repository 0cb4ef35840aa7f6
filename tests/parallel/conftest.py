"""What all tests with jobs share: clusters, and a fast start of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Clusters

WITHOUT = Path(__file__).parent / "without"


@pytest.fixture(autouse=True, scope="module")
def fast_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leaves out what takes a third of the start of a process, unless the module needs it."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "NEEDS_SKLEARN", False):
            patch.setenv("PYTHONPATH", str(WITHOUT), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    """Clusters whose processes run the scripts of many tests in turn."""
    started = Clusters()
    yield started
    started.close()
