"""Child process whose output and exit are reported by threads."""

from __future__ import annotations

import io
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, TypeAlias

from lbbsp_core.processes.spawn import signal_name, wait_unreaped

TAIL_LINES: Final = 80  # enough for a traceback through a framework
TAIL_LINES_WITHOUT_TRACEBACK: Final = 20
MAX_LINE_LENGTH: Final = 65_536  # bounds the memory used by a child that never ends its line
JOIN_SECONDS: Final = 2.0

Output: TypeAlias = Callable[[int, str], None]
"""Called with the index of a process and a line of its output."""


def discard(_index: int, _line: str) -> None:
    """Discards a line of output, which is still in the tail."""


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


def next_event(events: SimpleQueue[Event], until: float) -> Event | None:
    """Returns the next event, or None if none arrives in time, or within days.

    In Python 3.10 `SimpleQueue.get` waits indefinitely if its timeout passes before it begins to
    wait, unless an attempt without a timeout has just failed. If `until`, on the monotonic clock,
    has passed, only an event that has arrived is returned. No other thread may read from the queue.
    """
    with suppress(Empty):
        return events.get_nowait()
    remaining = min(until - time.monotonic(), 1e6)  # a queue accepts no wait of centuries
    with suppress(Empty):
        return events.get(timeout=remaining) if remaining > 0 else None
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
        process: subprocess.Popen[bytes],
        output: Output,
        events: SimpleQueue[Event],
        lock: threading.Lock,
    ) -> None:
        self.index, self.name, self.running = index, name, True
        self._output, self._events, self._lock = output, events, lock
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process  # see `spawn_python`
        self.pid: Final = process.pid  # also of the process group
        self._reader = threading.Thread(target=self._read, name=f"output-{index}", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"exit-{index}", daemon=True)
        self._reader.start()
        self._waiter.start()

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
        with io.TextIOWrapper(self._process.stdout, encoding="utf-8", errors="replace") as stream:
            for line in iter(lambda: stream.readline(MAX_LINE_LENGTH), ""):
                self._tail.append(line.rstrip("\n"))
                try:
                    with self._lock:
                        self._output(self.index, self._tail[-1])
                except Exception as error:
                    self._events.put(OutputFailed(error))
                    self._output = discard

    def _wait(self) -> None:
        """Waits on a separate thread, so that exits are reported at once and in order."""
        code: int | None = 1
        with suppress(ChildProcessError):  # this process ignores SIGCHLD: the exit status is lost
            code = wait_unreaped(self.pid)
        self._events.put(Exited(self.index, code or 0, self.name))
