"""A process that calls the step for us, and may die of it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from lbbsp_core.processes import _exec
from lbbsp_core.processes.child import signal_name
from lbbsp_core.processes.reaper import Guard
from lbbsp_core.profiler import _step

LONGEST_ANSWER: Final = 65_536
LAST_WORDS: Final = 2_000  # bytes
END_SECONDS: Final = 5.0
# Signals of memory that ran out: the kernel's killer, aborts of allocators, faults of libraries.
FATAL: Final = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


class ProfileError(ValueError):
    """The step cannot be profiled; the message says why, and what to do."""


class StepProcess:
    """Runs a script's step in a process of its own, in a session of its own.

    Nothing of it outlives `close`, nor us: the kernel ends it with us, a guard its children.

    Args:
        script: Path of a Python file.
        function: Name of the step in it.
        arguments: The script's ``sys.argv[1:]``.
        timeout: Seconds for loading the script, and for one step.
    """

    def __init__(
        self, script: str, function: str, arguments: Sequence[str], timeout: float
    ) -> None:
        self._name, self._timeout = f"{script}:{function}", timeout
        self._tail, self._pending = bytearray(), b""
        theirs_in, self._requests = os.pipe()
        self._answers, theirs_out = os.pipe()
        enter = [sys.executable, "-I", "-S", _exec.__file__, str(os.getpid()), ""]
        step = [_step.__file__, script, function, str(theirs_in), str(theirs_out), *arguments]
        self._guard = Guard()
        self._process = subprocess.Popen(
            [*enter, sys.executable, "-u", *step],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._guard.watch_group(self._process.pid)
        os.close(theirs_in)
        os.close(theirs_out)
        self._reader = threading.Thread(target=self._drain, name="step-output", daemon=True)
        self._reader.start()

    def load(self) -> None:
        """Waits until the script is loaded.

        Raises:
            ProfileError: It failed, ended, or takes longer than the timeout.
        """
        answer = self._answer("loading the script")
        if answer is None:
            raise self._error(f"the script {self._end()} before its step was called")
        if "error" in answer:
            raise self._error(f"the script cannot be loaded: {answer['error']}")

    def step(self, batch: int) -> tuple[float | None, str]:
        """One step.

        Returns:
            Its seconds, or None where memory ran out; and in the latter case how it did.

        Raises:
            ProfileError: The step failed otherwise, or takes longer than the timeout.
        """
        answer = self._ask({"batch": batch}, f"step({batch})")
        if answer is None:
            end = self._end()
            if end.startswith("was killed") and -self._process.returncode in FATAL:
                return None, end
            raise self._error(f"step({batch}): the process {end}")
        if "out_of_memory" in answer:
            return None, str(answer["out_of_memory"])
        if "error" in answer:
            raise self._error(f"step({batch}) failed: {answer['error']}")
        return self._seconds(answer), ""

    def device(self) -> str:
        """What the step runs on."""
        answer = self._ask({"device": True}, "asking for the device")
        return str((answer or {}).get("device", "unknown"))

    def close(self) -> None:
        """Ends the process and all that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._reader.join(END_SECONDS / 5)
        for fd in (self._requests, self._answers):
            with suppress(OSError):
                os.close(fd)
        self._requests = self._answers = -1
        self._guard.close()

    def _ask(self, request: dict[str, Any], doing: str) -> dict[str, Any] | None:
        with suppress(BrokenPipeError):  # it has ended: so will the answers
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        return self._answer(doing)

    def _answer(self, doing: str) -> dict[str, Any] | None:
        """The next line as an object; None where the process has ended instead."""
        deadline = time.monotonic() + self._timeout
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise self._error(
                    f"{doing} did not end within {self._timeout:g} s: raise the timeout, lower the "
                    "largest batch, or see why it hangs"
                )
            chunk = os.read(self._answers, LONGEST_ANSWER)
            if not chunk:
                return None
            self._pending += chunk
            if len(self._pending) > LONGEST_ANSWER:
                break
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._error(
                f"{doing}: the answer was not ours, got {line[:80]!r}: let the script write only "
                "to files that it has opened itself"
            )
        return answer

    def _seconds(self, answer: dict[str, Any]) -> float:
        seconds = answer.get("seconds")
        if not isinstance(seconds, float) or not 0 < seconds < 1e9:
            raise self._error(f"a step's seconds must be a positive number, got {answer!r}")
        return seconds

    def _end(self) -> str:
        """How the process has ended, once it has; it is ended if it only closed its pipe."""
        until = time.monotonic() + END_SECONDS
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT  # unreaped, its number stays its own
        while os.waitid(os.P_PID, self._process.pid, options) is None:
            if time.monotonic() > until:
                self.close()
                return "closed its pipe"
            time.sleep(0.01)
        self.close()
        code = self._process.returncode
        return f"ended with status {code}" if code >= 0 else f"was killed by {signal_name(-code)}"

    def _error(self, text: str) -> ProfileError:
        """An error with the last words of the script, which it ends."""
        self.close()
        words = bytes(self._tail).decode("utf-8", "replace").strip()
        said = f"\nits last output:\n{words}" if words else ""
        return ProfileError(f"{self._name}: {text}{said}")

    def _drain(self) -> None:
        """Reads what the script prints, lest it block, and keeps the end."""
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while chunk := os.read(stream.fileno(), 65_536):
                self._tail += chunk
                del self._tail[:-LAST_WORDS]
