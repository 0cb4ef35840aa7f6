"""Environment variables that this package reads, one function each."""

from __future__ import annotations

import os

NAMES = (
    "DMLC_ROLE",
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
    "DMLC_NUM_SERVER",
    "DMLC_NUM_WORKER",
)


def cluster() -> dict[str, str]:
    """Returns the ``DMLC_*`` variables that are set, by the launcher or manually."""
    return {name: os.environ[name] for name in NAMES if os.environ.get(name, "").strip()}
