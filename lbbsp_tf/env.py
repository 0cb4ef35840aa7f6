"""Every environment variable this package reads, one function each."""

from __future__ import annotations

import os


def tf_config() -> str:
    """``TF_CONFIG``: the cluster and this process's task, as JSON; set by the launcher."""
    return os.environ.get("TF_CONFIG", "")
