"""Child process that runs the step, and may be killed when memory runs out."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Final, TypeAlias

from lbbsp_core.processes.reaper import Reaper
from lbbsp_core.processes.spawn import signal_group, signal_name, spawn_python, wait_unreaped
from lbbsp_core.profiler import _step

MAX_ANSWER_BYTES: Final = 65_536
OUTPUT_TAIL_BYTES: Final = 2_000
EXIT_SECONDS: Final = 5.0  # between closing the pipe and ending
REAP_SECONDS: Final = 5.0  # between SIGKILL and the end
# Signals that mean a lack of memory: the kernel's OOM killer, aborts of allocators, faults of
# libraries. They are given by name, because Windows does not define all of them.
OUT_OF_MEMORY_SIGNALS: Final = ("SIGKILL", "SIGABRT", "SIGSEGV", "SIGBUS")

Message: TypeAlias = dict[str, object]


class ProfileError(ValueError):
    """Raised when a step cannot be profiled; the message states the cause and the remedy."""


class StepProcess:
    """Runs the step of a script in a child process, and in a new one after memory has run out.

    No process outlives `close`. If this process is killed, the kernel kills the child, and a
    reaper kills the processes that the child has started. Its timeout, in seconds, is that of
    loading the script, and of each step.
    """

    def __init__(
        self, script: str, function: str, arguments: Sequence[str], timeout: float
    ) -> None:
        self._name, self._timeout = f"{script}:{function}", timeout
        self._script, self._arguments = (_step.__file__, script, function), arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._answers = -1
        self._tail = bytearray()
        self.device, self.failure = "", ""

    def step(self, batch: int) -> float | None:
        """Returns the seconds of one step; None if memory ran out, which `failure` describes.

        Raises:
            ProfileError: The script could not be loaded, the step failed for another reason, or
                one of them took longer than the timeout.
        """
        process = self._process or self._start()
        with suppress(BrokenPipeError):  # the process has ended: reading the answer detects it
            os.write(self._requests, b"%d\n" % batch)
        answer = self._answer(f"step({batch})")
        if answer is None:
            code = self._wait_for_end(process)
            self.failure = _describe_end(code)
            if code is None or code >= 0 or signal_name(-code) not in OUT_OF_MEMORY_SIGNALS:
                raise self._error(f"step({batch}): the process {self.failure}")
            return None
        if "error" in answer:
            raise self._error(f"step({batch}) failed: {answer['error']}")
        if "out_of_memory" in answer:
            self.failure = str(answer["out_of_memory"])
            self.close()
            return None
        seconds, self.device = answer.get("seconds"), str(answer.get("device"))
        if not isinstance(seconds, float) or not 0 < seconds < 1e9:
            raise self._error(f"a step's seconds must be a positive number, got {answer!r}")
        return seconds

    def close(self) -> None:
        """Kills the process, if there is one, and all processes that it has started."""
        if self._process is None:
            return
        signal_group(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS)
        self._reader.join(REAP_SECONDS / 5)
        for fd in (self._requests, self._answers):
            with suppress(OSError):
                os.close(fd)
        self._reaper.close()
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        """Starts a process, and waits until it has loaded the script."""
        self._tail, self._pending = bytearray(), b""
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._reaper = Reaper()
        fds = requests, answers
        command = [*self._script, *map(str, fds), *self._arguments]
        self._process = process = spawn_python(command, pass_fds=fds)
        self._reaper.watch("group", process.pid)
        for fd in fds:
            os.close(fd)
        # Its output is read all the time, so that its pipe does not fill up.
        self._reader = threading.Thread(
            target=self._drain, args=[process.stdout], name="step-output", daemon=True
        )
        self._reader.start()
        answer = self._answer("loading the script")
        if answer is None:
            end = _describe_end(self._wait_for_end(process))
            raise self._error(f"the script {end} before its step was called")
        if "error" in answer:
            raise self._error(f"the script cannot be loaded: {answer['error']}")
        return process

    def _answer(self, doing: str) -> Message | None:
        """Returns the next answer, or None if the process closes its pipe first."""
        deadline = time.monotonic() + self._timeout
        while b"\n" not in self._pending:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._answers], [], [], remaining)[0]:
                raise self._error(
                    f"{doing} did not end within {self._timeout:g} s: raise the timeout, lower the "
                    "largest batch, or find out why it hangs"
                )
            chunk = os.read(self._answers, MAX_ANSWER_BYTES)
            if not chunk:
                return None
            self._pending += chunk
            if len(self._pending) > MAX_ANSWER_BYTES:
                break
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._error(
                f"{doing}: the answer must be a JSON object, got {line[:80]!r}: change the script "
                "to write only to files that it has opened itself"
            )
        return answer

    def _wait_for_end(self, process: subprocess.Popen[bytes]) -> int | None:
        """Reaps the process; returns its exit status, or minus the signal's number.

        None: it has closed its pipe without ending, and was then killed.
        """
        until = time.monotonic() + EXIT_SECONDS
        while wait_unreaped(process.pid, block=False) is None:
            if time.monotonic() > until:
                self.close()
                return None
            time.sleep(0.01)
        self.close()
        return process.returncode

    def _error(self, text: str) -> ProfileError:
        """Ends the script and returns an error that quotes the tail of its output."""
        self.close()
        tail = bytes(self._tail).decode("utf-8", "replace").strip()
        quoted = f"\nits last output:\n{tail}" if tail else ""
        return ProfileError(f"{self._name}: {text}{quoted}")

    def _drain(self, stream: IO[bytes]) -> None:
        """Reads the script's output and keeps the tail."""
        with stream:
            while chunk := os.read(stream.fileno(), 65_536):
                self._tail += chunk
                del self._tail[:-OUTPUT_TAIL_BYTES]


def _describe_end(code: int | None) -> str:
    """Describes an exit status, or None, as the predicate of a sentence."""
    if code is None:
        return "closed its pipe"
    return f"ended with status {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
