"""Leaves out what needs MXNet where it is missing, as with Python 3.13."""

from importlib.util import find_spec

import pytest

HAS_MXNET = find_spec("mxnet") is not None
if HAS_MXNET:
    import lbbsp_mx  # noqa: F401  # before MXNet, which needs names that NumPy no longer has


def pytest_ignore_collect(collection_path):
    """Ignores the tests of this folder but those of the missing package."""
    needs_mxnet = collection_path.name not in ("test_missing.py", "mx")
    return True if needs_mxnet and not HAS_MXNET else None


@pytest.fixture
def in_cluster(monkeypatch):
    """Describes this process as one of two workers of a cluster."""
    from helpers import CLUSTER

    for name, value in CLUSTER.items():
        monkeypatch.setenv(name, value)
