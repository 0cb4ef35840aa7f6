"""Scripts that tests run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

from waits import HANG_SECONDS


def errors_of(script: str, *, status: int = 0, **variables: str) -> list[str]:
    """Returns the lines that a script, which is no worker, writes to its standard error."""
    environment = {**os.environ, **variables}
    environment.pop("TF_CONFIG", None)
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == status, done.stderr
    return done.stderr.strip().splitlines()
