"""Child process whose output and exit are reported by threads."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, TypeAlias

from lbbsp_core.processes.spawn import signal_group, signal_name, spawn_python, wait_unreaped

TAIL_LINES: Final = 80  # enough for a traceback through a framework
TAIL_LINES_WITHOUT_TRACEBACK: Final = 20
MAX_LINE_LENGTH: Final = 65_536  # bounds the memory used by a child that never ends its line
JOIN_SECONDS: Final = 2.0

Output: TypeAlias = Callable[[int, str], None]
"""Called with the index of a process and a line of its output."""


class Exited(NamedTuple):
    """Event: a process has ended."""

    process_index: int  # of the launcher's: workers by rank, then the processes beside them
    code: int  # exit status, or minus the signal's number
    name: str  # in messages

    def __str__(self) -> str:
        """Names the process and the cause of its end."""
        if self.code >= 0:
            return f"{self.name} failed with exit status {self.code}"
        return f"{self.name} was ended by {signal_name(-self.code)}"

    @property
    def status(self) -> int:
        """Exit status as a shell reports it: 128 + the signal's number for a signal."""
        return self.code if self.code >= 0 else 128 - self.code


class Signalled(NamedTuple):
    """Event: the launcher received a signal that asks it to stop."""

    signum: int


class OutputFailed(NamedTuple):
    """Event: the output callback raised, for example because the reader of a pipe has exited."""

    error: Exception


Event: TypeAlias = Exited | Signalled | OutputFailed


def next_event(events: SimpleQueue[Event], until: float | None) -> Event | None:
    """Returns the next event, or None if none arrives in time.

    In Python 3.10 `SimpleQueue.get` waits indefinitely if its timeout passes before it begins to
    wait, unless an attempt without a timeout has just failed. If `until`, on the monotonic clock,
    has passed, only an event that has arrived is returned. No other thread may read from the queue.
    """
    try:
        return events.get_nowait()
    except Empty:
        remaining = None if until is None else until - time.monotonic()
    if remaining is not None and remaining <= 0:
        return None
    try:  # a queue accepts no wait of centuries; the caller waits again
        return events.get(timeout=None if remaining is None else min(remaining, 1e6))
    except Empty:
        return None


class ChildProcess:
    """Process in its own session, with one thread that reads its output and one that awaits it.

    The process is not reaped before `reap`: until then its process ID, which is also its process
    group's, cannot be assigned to another process. `output` is called with each line, one call at a
    time thanks to `lock`. `events` receives `Exited`, and `OutputFailed` if ``output`` raises.
    """

    def __init__(
        self,
        index: int,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cgroups: Sequence[Path],
        output: Output,
        events: SimpleQueue[Event],
        lock: threading.Lock,
        cores: Collection[int] = (),
    ) -> None:
        self.index, self.name = index, name
        self.running = True
        self._output, self._events, self._lock = output, events, lock
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = spawn_python(
            arguments, environment=environment, cgroups=cgroups, cores=cores
        )
        self._reader = threading.Thread(target=self._read, name=f"output-{index}", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"exit-{index}", daemon=True)
        self._reader.start()
        self._waiter.start()

    @property
    def pid(self) -> int:
        """Process ID, which is also the ID of the process group."""
        return self._process.pid

    def signal_alone(self, signum: signal.Signals) -> None:
        """Signals the process alone, which may have ended but has not been reaped."""
        if self.running:
            os.kill(self.pid, signum)

    def signal_group(self, signum: signal.Signals) -> None:
        """Signals the process and the processes that it has started."""
        signal_group(self.pid, signum)

    def reap(self) -> None:
        """Reaps the process, which has ended unless the kernel was unable to kill it."""
        self._waiter.join(JOIN_SECONDS)
        self._process.poll()

    def close(self) -> None:
        """Waits for the end of the output, but not long: a descendant may keep the pipe open."""
        self._reader.join(JOIN_SECONDS)

    def output_tail(self) -> list[str]:
        """Returns the last lines of the output, from the traceback on if there is one."""
        tail = list(self._tail)
        starts = [i for i, line in enumerate(tail) if line.startswith("Traceback (most recent")]
        return tail[starts[0] :] if starts else tail[-TAIL_LINES_WITHOUT_TRACEBACK:]

    def _read(self) -> None:
        """Forwards every line, and still drains the pipe after a failure: a full one blocks."""
        assert self._process.stdout is not None
        failed = False
        with io.TextIOWrapper(self._process.stdout, encoding="utf-8", errors="replace") as stream:
            for line in iter(lambda: stream.readline(MAX_LINE_LENGTH), ""):
                text = line.rstrip("\n")
                self._tail.append(text)
                failed = failed or not self._forward(text)

    def _forward(self, text: str) -> bool:
        try:
            with self._lock:
                self._output(self.index, text)
        except Exception as error:
            self._events.put(OutputFailed(error))
            return False
        return True

    def _wait(self) -> None:
        """Waits on a separate thread, so that exits are reported at once and in order."""
        try:
            code = wait_unreaped(self.pid)
        except ChildProcessError:  # this process ignores SIGCHLD, so the exit status is lost
            code = None
        self._events.put(Exited(self.index, 1 if code is None else code, self.name))
