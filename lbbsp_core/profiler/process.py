"""Child process that runs the step, and may be killed when memory runs out; the batches to run."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import IO, Final, NamedTuple, TypeAlias

from lbbsp_core.cost.fitting import Point
from lbbsp_core.processes.child import (
    Reaper,
    signal_group,
    signal_name,
    spawn_python,
    wait_unreaped,
)
from lbbsp_core.profiler import _step
from lbbsp_core.validate import require_integer

MAX_ANSWER_BYTES: Final = 65_536
OUTPUT_TAIL_BYTES: Final = 2_000
EXIT_SECONDS: Final = 5.0  # between closing the pipe and ending
REAP_SECONDS: Final = 5.0  # between SIGKILL and the end
# Signals that mean a lack of memory: the kernel's OOM killer, aborts of allocators, faults of
# libraries. They are given by name, because Windows does not define all of them.
OUT_OF_MEMORY_SIGNALS: Final = ("SIGKILL", "SIGABRT", "SIGSEGV", "SIGBUS")

Message: TypeAlias = dict[str, object]

MAX_REPEATS = 100
Step: TypeAlias = Callable[[int], float | None]
"""Runs a step on a batch and returns its seconds, or None if memory ran out."""
Progress: TypeAlias = Callable[[str, int, float | None], None]
"""Called with an activity ("measured", "probed" or "measured again"), a batch size, and the step's
seconds, or None if memory ran out."""


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


class SweepResult(NamedTuple):
    """Measurements of a sweep."""

    points: list[Point]  # by ascending batch
    out_of_memory_at: int | None  # smallest batch that does not fit in memory
    slow: bool  # it ended early, because a step took longer than `longest_step`


@dataclass(frozen=True, slots=True)
class BatchSweep:
    """Measures the step's seconds for growing batch sizes, and the largest batch that fits.

    Args:
        max_batch: Largest batch to try, in samples, >= 1.
        repeats: Minimum number of timed steps per batch, >= 1, after one warm-up step.
        point_seconds: Minimum total seconds of the timed steps per batch (100 steps at most).
        longest_step: Seconds of a step after which no larger batch is tried.
        rounds: Number of times that every batch is measured, with all others in between, >= 1.
            Other load on the machine only adds time, in bursts, so the smallest median is kept.
    """

    max_batch: int = 8192
    repeats: int = 5
    point_seconds: float = 0.3
    longest_step: float = 5.0
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("max_batch", "repeats", "rounds"):
            require_integer(name, getattr(self, name), 1)
        for name in ("point_seconds", "longest_step"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0 seconds, got {getattr(self, name)!r}")

    def run(self, step: Step, progress: Progress) -> SweepResult:
        """Measures 1, 2, 3, 4, 6, 8, 12, ... samples, and finds the exact memory limit.

        Args:
            step: Runs one step.
            progress: Called after each batch.

        Returns:
            The measurements, without points if a single sample does not fit.
        """
        points: list[Point] = []
        bad, is_slow = None, False
        for batch in self.batches():
            point = self._measure(step, progress, batch)
            if point is None:
                bad = self._find_memory_limit(step, progress, points, batch)
                break
            points.append(point)
            if point.seconds > self.longest_step:
                is_slow = batch < self.max_batch
                break
        for _ in range(1, self.rounds):
            points = [self._measure_again(step, progress, point) for point in points]
        return SweepResult(points, bad, is_slow)

    def batches(self) -> Iterator[int]:
        """Yields powers of two, the midpoints between them, and the largest batch."""
        batch = 1
        while batch < self.max_batch:
            yield batch
            midpoint = batch + batch // 2
            if batch < midpoint < self.max_batch:
                yield midpoint
            batch *= 2
        yield self.max_batch

    def _measure(self, step: Step, progress: Progress, batch: int) -> Point | None:
        """Returns the median of repeated steps and reports it; None if memory ran out."""
        point = self._median(step, batch)
        progress("measured", batch, None if point is None else point.seconds)
        return point

    def _measure_again(self, step: Step, progress: Progress, point: Point) -> Point:
        """Returns the point with the smaller of its seconds and those of another measurement."""
        other = self._median(step, point.batch)
        if other is None:  # less memory is free than before: keep the earlier measurement
            return point
        progress("measured again", point.batch, other.seconds)
        repeats = point.repeats + other.repeats
        return Point(point.batch, min(point.seconds, other.seconds), repeats)

    def _median(self, step: Step, batch: int) -> Point | None:
        times: list[float] = []
        if step(batch) is None:  # warm-up: tracing, allocation
            return None
        while len(times) < self.repeats or (
            sum(times) < self.point_seconds and len(times) < MAX_REPEATS
        ):
            if (seconds := step(batch)) is None:
                return None
            times.append(seconds)
        return Point(batch, median(times), len(times))

    def _find_memory_limit(
        self, step: Step, progress: Progress, points: list[Point], bad: int
    ) -> int:
        """Bisects between the last point and a batch that did not fit; measures the largest one."""
        while points and bad - points[-1].batch > 1:
            good = points[-1].batch
            while bad - good > 1:
                midpoint = (good + bad) // 2
                # twice, because the first step may leave less memory for the second
                seconds = None if step(midpoint) is None else step(midpoint)
                progress("probed", midpoint, seconds)
                good, bad = (good, midpoint) if seconds is None else (midpoint, bad)
            if good == points[-1].batch:
                break
            if (point := self._measure(step, progress, good)) is None:
                bad = good
            else:
                points.append(point)
        return bad
