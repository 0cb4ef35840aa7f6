"""Jobs into which faults are injected, started by the launcher or process by process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from lbbsp_core.launch.cluster import cluster_variables, quiet_defaults

PAUSE_SECONDS = 5.0
SCRIPTS = {"keras": "faults_keras.py", "gluon": "faults_gluon.py"}
FRAMEWORKS = {"keras": "tensorflow", "gluon": "mxnet"}


class End(NamedTuple):
    """How a job ended.

    Args:
        status: Exit status of the launcher; by hand, the first of a worker that is not 0.
        text: Output of all processes.
        seconds: From the fault to the end of all processes but frozen ones; None without a fault.
        left: Number of processes that had to be ended, frozen ones not counted.
    """

    status: int
    text: str
    seconds: float | None
    left: int


def run_job(
    plugin: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    *,
    workers: int,
    launched: Sequence[str] | None,
    pauses: bool = False,
    limit_seconds: float,
) -> End:
    """Runs a job to its end; none of its processes is left when this returns.

    Args:
        plugin: "keras" or "gluon".
        arguments: Arguments of its script.
        variables: Environment of the scripts, added to ours.
        workers: Number of workers.
        launched: Further options of ``lbbsp launch``; None starts each process by hand.
        pauses: Whether a process that stops itself is continued after `PAUSE_SECONDS`.
        limit_seconds: Time after which what still runs is ended, and counted as left.
    """
    script = [str(Path(__file__).with_name(SCRIPTS[plugin])), *arguments]
    environment = {**os.environ, **quiet_defaults(), **variables}
    if launched is None:
        cluster = cluster_variables(FRAMEWORKS[plugin], workers)
        commands = [(script, own) for own in cluster.workers]
        commands += [(list(helper.command), helper.environment) for helper in cluster.helpers]
    else:
        commands = [([*launcher(plugin, workers), *launched, *script], {})]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        processes = [_start(command, {**environment, **own}, output) for command, own in commands]
        left, ended = _wait(processes, pauses, limit_seconds)
        statuses = [process.wait() for process in processes][:workers]
        output.seek(0)
        text = output.read()
    fault = re.search(r"FAULT ([\d.]+)", text)
    status = next((status for status in statuses if status), 0)
    return End(status, text, None if fault is None else ended - float(fault[1]), left)


def launcher(plugin: str, workers: int) -> list[str]:
    """Returns the arguments of Python that start ``lbbsp launch``, before its further options."""
    launch = ["-c", "from lbbsp_core.cli import main; main()", "launch", "-n", str(workers)]
    return [*launch, "--framework", FRAMEWORKS[plugin]]


def _start(
    command: Sequence[str], environment: Mapping[str, str], output: IO[str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *command],
        env=dict(environment),
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], pauses: bool, limit_seconds: float
) -> tuple[int, float]:
    """Waits until all processes and their descendants have ended, or are frozen; ends the rest.

    Returns:
        Number of processes that had to be ended without being frozen, and the time of the end.
    """
    seen = {psutil.Process(process.pid) for process in processes}
    until, stopped_since = time.monotonic() + limit_seconds, None
    while True:
        for process in [*seen]:
            with suppress(psutil.Error):
                seen.update(process.children(recursive=True))
        states = {process: _state(process) for process in seen}
        stopped = [process for process, state in states.items() if state == psutil.STATUS_STOPPED]
        running = [process for process, state in states.items() if state and process not in stopped]
        if pauses and stopped:
            stopped_since = stopped_since or time.monotonic()
            if time.monotonic() >= stopped_since + PAUSE_SECONDS:
                for process in stopped:
                    process.send_signal(signal.SIGCONT)
        elif not running or time.monotonic() >= until:
            break
        time.sleep(0.1)
    ended = time.time()
    for process in [*stopped, *running]:
        with suppress(psutil.Error):
            process.kill()
    return len(running), ended


def _state(process: psutil.Process) -> str | None:
    """Returns the state of a process, or None if it has ended."""
    with suppress(psutil.Error):
        if process.is_running() and (state := process.status()) != psutil.STATUS_ZOMBIE:
            return str(state)
    return None
