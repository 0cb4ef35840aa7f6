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
from typing import Final, TypeAlias

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
    """Runs the step of a script in a child process in its own session.

    No process outlives `close`. If this process is killed, the kernel kills the child, and a
    reaper kills the processes that the child has started.

    Args:
        script: Path of a Python file.
        function: Name of its step function.
        arguments: The script's ``sys.argv[1:]``.
        timeout: Seconds for loading the script, and for each step, > 0.
    """

    def __init__(
        self, script: str, function: str, arguments: Sequence[str], timeout: float
    ) -> None:
        self._name, self._timeout = f"{script}:{function}", timeout
        self._tail, self._pending = bytearray(), b""
        child_requests, self._requests = os.pipe()
        self._answers, child_answers = os.pipe()
        fds = (child_requests, child_answers)
        self._reaper = Reaper()
        self._process = spawn_python(
            [_step.__file__, script, function, *map(str, fds), *arguments], pass_fds=fds
        )
        self._reaper.watch("group", self._process.pid)
        for fd in fds:
            os.close(fd)
        self._reader = threading.Thread(target=self._drain, name="step-output", daemon=True)
        self._reader.start()

    def load(self) -> None:
        """Waits until the script is loaded.

        Raises:
            ProfileError: Loading failed, ended the process, or took longer than the timeout.
        """
        answer = self._answer("loading the script")
        if answer is None:
            end = _describe_end(self._wait_for_end())
            raise self._error(f"the script {end} before its step was called")
        if "error" in answer:
            raise self._error(f"the script cannot be loaded: {answer['error']}")

    def step(self, batch: int) -> tuple[float | None, str]:
        """Runs one step.

        Args:
            batch: Batch size in samples, >= 1.

        Returns:
            The step's seconds and an empty string, or None and a description of the failure if
            memory ran out.

        Raises:
            ProfileError: The step failed for another reason, or took longer than the timeout.
        """
        answer = self._ask({"batch": batch}, f"step({batch})")
        if answer is None:
            code = self._wait_for_end()
            if code is not None and code < 0 and signal_name(-code) in OUT_OF_MEMORY_SIGNALS:
                return None, _describe_end(code)
            raise self._error(f"step({batch}): the process {_describe_end(code)}")
        if "out_of_memory" in answer:
            return None, str(answer["out_of_memory"])
        if "error" in answer:
            raise self._error(f"step({batch}) failed: {answer['error']}")
        return self._seconds(answer), ""

    def device(self) -> str:
        """Returns the name of the device that the step runs on."""
        answer = self._ask({"device": True}, "asking for the device")
        return str((answer or {}).get("device", "unknown"))

    def close(self) -> None:
        """Kills the process and all processes that it has started."""
        signal_group(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS)
        self._reader.join(REAP_SECONDS / 5)
        for fd in (self._requests, self._answers):
            with suppress(OSError):
                os.close(fd)
        self._requests = self._answers = -1
        self._reaper.close()

    def _ask(self, request: Message, doing: str) -> Message | None:
        with suppress(BrokenPipeError):  # the process has ended: reading the answer detects it
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        return self._answer(doing)

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

    def _seconds(self, answer: Message) -> float:
        seconds = answer.get("seconds")
        if not isinstance(seconds, float) or not 0 < seconds < 1e9:
            raise self._error(f"a step's seconds must be a positive number, got {answer!r}")
        return seconds

    def _wait_for_end(self) -> int | None:
        """Waits for the process to end, and reaps it.

        Returns:
            The exit status, or minus the signal's number; None if the process closed its pipe
            without ending, and was then killed.
        """
        until = time.monotonic() + EXIT_SECONDS
        while wait_unreaped(self._process.pid, block=False) is None:
            if time.monotonic() > until:
                self.close()
                return None
            time.sleep(0.01)
        self.close()
        return self._process.returncode

    def _error(self, text: str) -> ProfileError:
        """Ends the script and returns an error that quotes the tail of its output."""
        self.close()
        tail = bytes(self._tail).decode("utf-8", "replace").strip()
        quoted = f"\nits last output:\n{tail}" if tail else ""
        return ProfileError(f"{self._name}: {text}{quoted}")

    def _drain(self) -> None:
        """Reads the script's output, so that its pipe does not fill up, and keeps the tail."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while chunk := os.read(stream.fileno(), 65_536):
                self._tail += chunk
                del self._tail[:-OUTPUT_TAIL_BYTES]


def _describe_end(code: int | None) -> str:
    """Describes an exit status, or None, as the predicate of a sentence."""
    if code is None:
        return "closed its pipe"
    return f"ended with status {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
