"""Scripts that tests run in a process of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from waits import HANG_SECONDS


def errors_of(
    script: str, *arguments: str, status: int = 0, seconds: float = HANG_SECONDS, **variables: str
) -> list[str]:
    """Returns the lines that a script, which is no worker, writes to its standard error."""
    environment = {**os.environ, **variables}
    environment.pop("TF_CONFIG", None)
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, text=True, timeout=seconds
    )
    assert done.returncode == status, done.stderr
    return done.stderr.strip().splitlines()


_held: list[socket.socket] = []


def closed_addresses() -> list[str]:
    """Returns two addresses at which nothing listens, and that nobody gets who asks for any."""
    for _ in range(2):
        _held.append(socket.socket())
        _held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # others may listen there
        _held[-1].bind(("127.0.0.1", 0))
    return [f"127.0.0.1:{each.getsockname()[1]}" for each in _held[-2:]]


class Ended(NamedTuple):
    """Exit status of a script, and what it has written."""

    status: int
    said: str


FORKS = """
import os, sys
import keras, tensorflow  # once for all scripts

folder, *names = sys.argv[1:]
for name in names:
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, file=open(f"{folder}/{name}.status", "w"))
        continue
    said = os.open(f"{folder}/{name}.said", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    exec(open(f"{folder}/{name}").read(), {"__name__": "__main__"})
    break
"""


def in_forks(folder: Path, scripts: dict[str, str]) -> dict[str, Ended]:
    """Runs scripts one after the other, in forks of a process that has imported TensorFlow."""
    for name, script in scripts.items():
        (folder / name).write_text(script)
    errors_of(FORKS, str(folder), *scripts, seconds=len(scripts) * HANG_SECONDS)
    text = {path.name: path.read_text() for path in folder.iterdir()}
    return {name: Ended(int(text[f"{name}.status"]), text[f"{name}.said"]) for name in scripts}
