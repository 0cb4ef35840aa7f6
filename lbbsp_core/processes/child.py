"""Child processes: how they are spawned, reaped, and reported by threads."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Literal, NamedTuple, TypeAlias

from lbbsp_core.processes import _exec, _reaper

TAIL_LINES: Final = 80  # enough for a traceback through a framework
TAIL_LINES_WITHOUT_TRACEBACK: Final = 20
MAX_LINE_LENGTH: Final = 65_536  # bounds the memory used by a child that never ends its line
JOIN_SECONDS: Final = 2.0

Output: TypeAlias = Callable[[int, str], None]
"""Called with the index of a process and a line of its output."""


class Reaper:
    """Helper process that kills processes and removes cgroups if this process is killed.

    It reads their names from a pipe and acts when the pipe closes.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _reaper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that a Ctrl-C at the terminal does not end it
            text=True,
        )

    def watch(self, kind: Literal["group", "cgroup", "job"], name: object) -> None:
        """Adds what ends with this process: a process group, a cgroup, or the folder of a job."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the helper was killed: the job continues without it
            self._process.stdin.write(f"{kind} {name}\n")
            self._process.stdin.flush()

    def act(self) -> None:
        """Ends everything now that the helper would end after this process."""
        self._process.communicate()

    def close(self) -> None:
        """Kills the helper, so that it does not act on the names that it has received."""
        self._process.kill()
        self._process.communicate()


def exec_command(
    command: Sequence[str], cgroups: Sequence[Path] = (), cores: Collection[int] = ()
) -> list[str]:
    """Returns the command line that runs `command` through ``_exec``."""
    python = [sys.executable, "-I", "-S", _exec.__file__, str(os.getpid())]
    return [*python, "\n".join(map(str, cgroups)), ",".join(map(str, cores)), *command]


def spawn_python(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cgroups: Sequence[Path] = (),
    pass_fds: Collection[int] = (),
    cores: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Starts this Python as the leader of a new session, which is also a new process group.

    Standard input is empty; standard output and error share one pipe, unbuffered by the child.
    """
    return subprocess.Popen(
        exec_command([sys.executable, "-u", *arguments], cgroups, cores),
        env=None if environment is None else dict(environment),
        pass_fds=tuple(pass_fds),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def signal_group(group: int, signum: signal.Signals) -> None:
    """Signals a process group that may have ended already."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


def wait_unreaped(pid: int, *, block: bool = True) -> int | None:
    """Waits for a child's end without reaping it, so that its process ID is not reused yet.

    Returns the exit status, or minus the signal's number; None while the child still runs. Raises
    ChildProcessError if the kernel has reaped it, because this process ignores SIGCHLD.
    """
    options = os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG)
    end = os.waitid(os.P_PID, pid, options)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def signal_name(signum: int) -> str:
    """Returns the name of a signal, such as "SIGKILL"; real-time signals only have a number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


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
        code = None
        with suppress(ChildProcessError):  # this process ignores SIGCHLD: the exit status is lost
            code = wait_unreaped(self.pid)
        self._events.put(Exited(self.index, 1 if code is None else code, self.name))
