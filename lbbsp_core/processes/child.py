"""One worker process: how it starts, what it prints, how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Final, NamedTuple

from lbbsp_core.processes import _exec

TAIL_LINES: Final = 80  # long enough for a traceback through a framework
TAIL_WITHOUT_TRACEBACK: Final = 20
LONGEST_LINE: Final = 65_536  # a worker that never ends its line must not fill our memory
STUCK_SECONDS: Final = 2.0

Output = Callable[[int, str], None]


class Exited(NamedTuple):
    """The process at a place has ended: its exit status, or minus the signal's number.

    The place of a worker is its rank; that of what runs beside the workers comes after these.
    """

    rank: int
    code: int
    name: str

    def __str__(self) -> str:
        """Name the process, and how it ended."""
        if self.code >= 0:
            return f"{self.name} failed with exit status {self.code}"
        return f"{self.name} was ended by {signal_name(-self.code)}"

    @property
    def status(self) -> int:
        """The exit status as a shell gives it: 128 + the signal's number for a signal."""
        return self.code if self.code >= 0 else 128 - self.code


class Signalled(NamedTuple):
    """The launcher was asked to stop."""

    signum: int


class Broken(NamedTuple):
    """The output could not be handed on, such as when whoever reads it has gone."""

    error: Exception


Event = Exited | Signalled | Broken


def signal_name(signum: int) -> str:
    """Such as SIGKILL; real-time signals have no name of their own."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


class Worker:
    """A process in a session of its own, and the threads that read it and wait for it.

    The process is not reaped before ``reap``: until then its number, which is also that of its
    process group, cannot come to mean another process.

    Args:
        rank: of the worker.
        name: what it is called in messages.
        command: Python's arguments.
        environment: all of it.
        procs: the file of the cgroup to enter, None for none.
        output: given each line; one call at a time.
        events: given its end, or the output's failure.
        lock: held while ``output`` runs.
    """

    def __init__(
        self,
        rank: int,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        procs: Path | None,
        output: Output,
        events: SimpleQueue[Event],
        lock: threading.Lock,
    ) -> None:
        self.rank, self.name = rank, name
        self.running = True
        self._output, self._events, self._lock = output, events, lock
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = _start(command, environment, procs)
        self._reader = threading.Thread(target=self._read, name=f"output-{rank}", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name=f"exit-{rank}", daemon=True)
        self._reader.start()
        self._waiter.start()

    @property
    def pid(self) -> int:
        """The process, and its process group."""
        return self._process.pid

    def signal_group(self, signum: signal.Signals) -> None:
        """Signal the worker and what it has started."""
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):
            return

    def reap(self) -> None:
        """Let the kernel forget the process. It has ended, unless the kernel cannot end it."""
        self._waiter.join(STUCK_SECONDS)
        self._process.poll()

    def close(self) -> None:
        """Wait for the last of the output, unless something that got away still holds it open."""
        self._reader.join(STUCK_SECONDS)

    def last_words(self) -> list[str]:
        """The end of its output, from its traceback on where there is one."""
        tail = list(self._tail)
        starts = [i for i, line in enumerate(tail) if line.startswith("Traceback (most recent")]
        return tail[starts[0] :] if starts else tail[-TAIL_WITHOUT_TRACEBACK:]

    def _read(self) -> None:
        """Hand on every line, and keep draining when that fails: a full pipe stops the worker."""
        stream = self._process.stdout
        assert stream is not None
        failed = False
        with stream:
            for line in iter(lambda: stream.readline(LONGEST_LINE), ""):
                text = line.rstrip("\n")
                self._tail.append(text)
                failed = failed or not self._hand_on(text)

    def _hand_on(self, text: str) -> bool:
        try:
            with self._lock:
                self._output(self.rank, text)
        except Exception as error:
            self._events.put(Broken(error))
            return False
        return True

    def _wait(self) -> None:
        """Wait in a thread of its own, so that ends are seen at once and in their order."""
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # our process ignores SIGCHLD: the kernel tells nobody how it was
            end = None
        if end is None:
            self._events.put(Exited(self.rank, 1, self.name))
        else:
            by_itself = end.si_code == os.CLD_EXITED
            code = end.si_status if by_itself else -end.si_status
            self._events.put(Exited(self.rank, code, self.name))


def _start(
    command: Sequence[str], environment: Mapping[str, str], procs: Path | None
) -> subprocess.Popen[str]:
    """Start Python by way of ``_exec``, which stays the same process."""
    enter = [sys.executable, "-I", "-S", _exec.__file__, str(os.getpid()), str(procs or "")]
    return subprocess.Popen(
        [*enter, sys.executable, "-u", *command],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
    )
