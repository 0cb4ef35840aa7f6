"""Program that runs one process of a job on another host: ``python -m lbbsp_core.launch.agent``.

``_relay`` starts it by ssh, and describes the protocol. No process that it has started outlives it,
nor the connection to the launcher.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

from lbbsp_core._version import __version__
from lbbsp_core.launch._relay import BEAT_SECONDS, HELLO, SILENCE_SECONDS
from lbbsp_core.launch.cluster import listening_port, with_defaults
from lbbsp_core.launch.devices import NO_GPU, VARIABLE, assign_devices
from lbbsp_core.launch.hosts import require_free_port
from lbbsp_core.launch.script import check_command
from lbbsp_core.processes import _reaper, child
from lbbsp_core.processes.child import Reaper, signal_group, spawn_python, wait_unreaped
from lbbsp_core.resources.gpu import count_gpus
from lbbsp_core.runtime.reliability.marks import folder_variable, mark_texts, note_failed

LOOK_SECONDS: Final = 0.1  # between two looks at the marks
LEFTOVER_SECONDS: Final = 0.5  # for processes that a process leaves behind
TERM_SECONDS: Final = 3.0  # to end, for a process whose launcher has gone
PORT_SECONDS: Final = 10.0  # for the end of an earlier attempt
_Description: TypeAlias = Mapping[str, Any]  # see `Elsewhere.command`
_lock = threading.Lock()  # of the connection


def main() -> None:
    """Runs the process that the first line of the input describes."""
    print(f"{HELLO}{__version__}", flush=True)
    if not select.select([0], [], [], SILENCE_SECONDS)[0]:
        return
    with open(0, "rb", buffering=0, closefd=False) as stream:
        line = stream.readline()  # and no byte more
    if not line:
        return
    description = json.loads(line)
    try:
        environment = _prepare(description)
    except (OSError, ValueError) as error:
        _send("refused", str(error))
        return
    with suppress(OSError):  # the connection has ended: so does everything
        _Process(description["command"], environment).run()


def _prepare(description: _Description) -> dict[str, str]:
    """Enters the folder of the job; returns the environment of its process on this host."""
    folder, variables = description["directory"], description["environment"]
    try:
        os.chdir(folder)
    except OSError as error:
        raise ValueError(
            f"the working directory {folder} cannot be entered ({error.strerror}): it must be at "
            "the same path on all hosts"
        ) from None
    check_command(description["command"])
    if port := listening_port(variables):
        require_free_port(port, PORT_SECONDS)
    if run_dir := variables.get("LBBSP_RUN_DIR"):
        Path(run_dir).mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, **variables}
    return with_defaults({**environ, **_devices(description, environ)})


def _devices(description: _Description, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Returns variables of the GPUs of a process; the workers of a host divide its GPUs."""
    place, workers = description["place"]
    if place is None:
        return NO_GPU
    if VARIABLE not in environ and (gpus := count_gpus()) and not description["devices"]:
        environ = {**environ, VARIABLE: ",".join(map(str, range(gpus)))}
    assigned = assign_devices(description["devices"], workers, environ=environ)
    if assigned is None:
        return {}
    if assigned.note is not None and place == 0:
        _send("line", f"lbbsp launch: {assigned.note}")
    return assigned.environments[int(place)]


class _Process:
    """Process of a job, and its connection to the launcher."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lbbsp-launch-"))
        self._marks, self._ended = self._folder / "0", False
        self._marks.mkdir()
        self._reaper = Reaper()
        self._reaper.watch("job", self._folder)
        variables = {_reaper.JOB: str(self._folder), **folder_variable(self._marks)}
        process = spawn_python(command, environment={**environment, **variables})
        self._reaper.watch("group", process.pid)
        self._events: SimpleQueue[child.Event] = SimpleQueue()
        self._child = child.ChildProcess(
            0, "", process, lambda _, line: _send("line", line), self._events, threading.Lock()
        )
        threading.Thread(target=self._obey, daemon=True).start()

    def run(self) -> None:
        """Tells what the process does, until it has ended; then ends all that it has started."""
        beaten, last_marks, event = 0.0, dict[str, str](), None
        while event is None:
            event = child.next_event(self._events, time.monotonic() + LOOK_SECONDS)
            if isinstance(event, child.OutputFailed):
                raise event.error
            if (marks := mark_texts(self._marks)) != last_marks:
                last_marks = marks
                _send("marks", marks)
            if time.monotonic() >= beaten + BEAT_SECONDS:
                beaten = time.monotonic()
                _send("beat")
        assert isinstance(event, child.Exited)
        until = time.monotonic() + LEFTOVER_SECONDS
        signal_group(self._child.pid, signal.SIGTERM)
        while _reaper.processes_of(str(self._folder)) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        self._ended = True
        self._reaper.act()
        self._child.reap()
        self._child.close()
        _send("end", event.code)

    def _obey(self) -> None:
        """Passes requests to end on; ends everything if the launcher has gone.

        The main thread may wait for the connection, which an unplugged cable leaves open.
        """
        is_ending = False
        while select.select([0], [], [], SILENCE_SECONDS)[0] and (data := os.read(0, 1 << 12)):
            words = data.split()
            if b"failed" in words:
                note_failed(self._marks)
            if b"end" in words:
                is_ending = True
                with suppress(ProcessLookupError):
                    os.kill(self._child.pid, signal.SIGTERM)
        if self._ended:  # but for what the main thread still waits to tell
            os._exit(0)
        until = time.monotonic() + (0.0 if is_ending else TERM_SECONDS)
        signal_group(self._child.pid, signal.SIGTERM)
        while wait_unreaped(self._child.pid, block=False) is None and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        os._exit(1)  # then the reaper acts


def _send(*message: object) -> None:
    """Tells the launcher something."""
    with _lock:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
