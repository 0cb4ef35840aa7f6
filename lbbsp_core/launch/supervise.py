"""Starts the processes of a job, watches them, and ends all of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Final, NamedTuple

import psutil

from lbbsp_core.launch.cluster import JobSpec
from lbbsp_core.launch.cpu_shares import Stage
from lbbsp_core.launch.throttle import Throttle
from lbbsp_core.processes.child import ChildProcess, Event, Exited, Output, OutputFailed, Signalled
from lbbsp_core.processes.reaper import Reaper
from lbbsp_core.processes.spawn import signal_name

GRACE_SECONDS: Final = 0.2  # within which workers fail as a consequence of the first failure
CLEANUP_SECONDS: Final = 0.5  # for the helpers of workers that ended normally
TERM_SECONDS: Final = 3.0
KILL_SECONDS: Final = 3.0
POLL_SECONDS: Final = 0.05
TIMED_OUT: Final = 124  # as for timeout(1)


class Outcome(NamedTuple):
    """Result of a job.

    Args:
        status: Exit status.
        failed_index: Index of the process that failed first, or None; a worker's is its rank.
        message: Message to the user, or None.
        failed_name: Name of the process that failed first, in front of its output.
    """

    status: int
    failed_index: int | None = None
    message: str | None = None
    failed_name: str = ""


class Supervisor:
    """Runs the processes of one job.

    Args:
        throttle: Slows down the workers.
        reaper: Kills the processes if this process is killed.
        output: Called with the rank and each line of output; one call at a time.
        events: Receives signals to this process and the exits of its children.
    """

    def __init__(
        self, throttle: Throttle, reaper: Reaper, output: Output, events: SimpleQueue[Event]
    ) -> None:
        self._throttle, self._reaper, self._output = throttle, reaper, output
        self._events = events
        self._lock = threading.Lock()
        self._workers: list[ChildProcess] = []
        self._helpers: list[ChildProcess] = []
        self._scripts: list[ChildProcess] = []

    def start(self, command: Sequence[str], job: JobSpec) -> None:
        """Starts the workers, and the processes beside them, which are not slowed down.

        Output of a coordinator, whose script is the only one, is reported as that of rank 0.
        """
        cgroups = self._throttle.cgroups()
        for cgroup in cgroups:
            self._reaper.watch_cgroup(cgroup)
        for helper in job.helpers:
            index = len(job.workers) + len(self._helpers)
            self._helpers.append(self._start(index, *helper, None, _discard_output))
        if job.coordinator is None:
            worker_command, worker_output = command, self._output
        else:
            worker_command, worker_output = job.worker_command, _discard_output
        for rank, environment in enumerate(job.workers):
            procs = cgroups[rank] / "cgroup.procs" if cgroups else None
            worker = self._start(
                rank, f"worker {rank}", worker_command, environment, procs, worker_output
            )
            self._workers.append(worker)
            self._throttle.attach(rank, worker.pid)
        if job.coordinator is None:
            self._scripts = self._workers
        else:
            index = len(self._processes())
            chief = self._start(
                index, "chief", command, job.coordinator, None, self._output_as_rank_0
            )
            self._helpers.append(chief)
            self._scripts = [chief]

    def _start(
        self,
        index: int,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        procs: Path | None,
        output: Output,
    ) -> ChildProcess:
        process = ChildProcess(
            index, name, command, environment, procs, output, self._events, self._lock
        )
        self._reaper.watch_group(process.pid)
        return process

    def watch(self, changes: Sequence[Stage], started: float, timeout: float | None) -> Outcome:
        """Waits for the end of the job, and changes the speeds at the scheduled times.

        The job ends when all scripts have ended, a process fails, a signal arrives, or the
        timeout has passed.

        Args:
            changes: Stages in time order; their seconds count from ``started``.
            started: Start of the job on the monotonic clock, in seconds.
            timeout: Seconds from ``started`` on, or None for no limit.
        """
        deadline = started + timeout if timeout is not None else None
        pending = deque(changes)
        while any(script.running for script in self._scripts):
            next_change = started + pending[0].seconds if pending else None
            event = self._next_event(_earliest(deadline, next_change))
            if event is not None:
                outcome = self._handle_event(event)
                if outcome is not None:
                    return outcome
            elif deadline is not None and time.monotonic() >= deadline:
                return Outcome(TIMED_OUT, None, self._timeout_message(timeout))
            elif next_change is not None and time.monotonic() >= next_change:
                self._throttle.apply(pending.popleft().shares)
        return Outcome(0)

    def stop(self, *, succeeded: bool) -> None:
        """Ends all remaining processes, by SIGTERM, then by SIGKILL, and reads their last output.

        Args:
            succeeded: Whether the job succeeded: then processes that the workers have started
                get a moment to end without a signal.
        """
        for worker in self._workers:
            with suppress(OSError):  # a failure here must not prevent the steps below
                self._throttle.release(worker.index)
        if not (succeeded and self._wait_until_gone(CLEANUP_SECONDS)):
            self._signal_all(signal.SIGTERM)
            if not self._wait_until_gone(TERM_SECONDS):
                self._signal_all(signal.SIGKILL)
                self._wait_until_gone(KILL_SECONDS)
        for process in self._processes():
            process.reap()
        self._throttle.close()
        for process in self._processes():
            process.close()

    def check_output(self) -> None:
        """Raises the error, if any, that the output callback raised after the last exit."""
        while (event := self._next_event(0.0)) is not None:
            if isinstance(event, OutputFailed):
                raise event.error

    def output_tail(self, process_index: int) -> list[str]:
        """Returns the last lines of a process's output."""
        return self._processes()[process_index].output_tail()

    def _output_as_rank_0(self, _index: int, line: str) -> None:
        self._output(0, line)

    def _processes(self) -> list[ChildProcess]:
        """Returns all processes by index: workers by rank, then the processes beside them."""
        return [*self._workers, *self._helpers]

    def _next_event(self, until: float | None) -> Event | None:
        try:
            return self._events.get(timeout=_remaining(until))
        except Empty:
            return None

    def _handle_event(self, event: Event) -> Outcome | None:
        """Returns the outcome that an event causes, or None if the job continues."""
        if isinstance(event, OutputFailed):
            raise event.error
        if isinstance(event, Signalled):
            return Outcome(128 + event.signum, None, f"ended by {signal_name(event.signum)}")
        self._mark_exited(event)
        if event.code == 0:
            return None
        later = self._failures_within(GRACE_SECONDS)
        message = f"{event} (followed by: {'; '.join(map(str, later))})" if later else str(event)
        return Outcome(event.status, event.process_index, message, _short(event.name))

    def _mark_exited(self, event: Exited) -> None:
        self._processes()[event.process_index].running = False
        if event.process_index < len(self._workers):
            self._throttle.release(event.process_index)

    def _failures_within(self, seconds: float) -> list[Exited]:
        """Returns the processes that fail shortly after the first failure, as its consequence."""
        until, failures = time.monotonic() + seconds, []
        while isinstance(event := self._next_event(until), Exited):
            self._mark_exited(event)
            if event.code != 0:
                failures.append(event)
        return failures

    def _timeout_message(self, timeout: float | None) -> str:
        names = ", ".join(_short(script.name) for script in self._scripts if script.running)
        return f"timed out after {timeout:g} s; still running: {names}"

    def _signal_all(self, signum: signal.Signals) -> None:
        for process in self._processes():
            process.signal_group(signum)

    def _wait_until_gone(self, seconds: float) -> bool:
        """Returns whether all processes end in time; a second signal ends the wait."""
        until = time.monotonic() + seconds
        while self._alive():
            event = self._next_event(min(until, time.monotonic() + POLL_SECONDS))
            if isinstance(event, Signalled) or time.monotonic() >= until:
                return False
        return True

    def _alive(self) -> bool:
        """Returns whether any process of the children's groups is alive; zombies are not."""
        groups = {process.pid for process in self._processes()}
        return any(_group_of(pid) in groups and not _is_zombie(pid) for pid in psutil.pids())


def _discard_output(_index: int, _line: str) -> None:
    """Discards a line: the output of a helper is only printed, from its tail, if it fails."""


def _short(name: str) -> str:
    """Returns the rank of a worker, or the name of another process."""
    return name.removeprefix("worker ")


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


def _earliest(*times: float | None) -> float | None:
    return min((moment for moment in times if moment is not None), default=None)


def _remaining(until: float | None) -> float | None:
    # A queue accepts no wait of centuries; the caller waits again.
    return None if until is None else min(max(0.0, until - time.monotonic()), 1e6)


@contextmanager
def signal_handlers(events: SimpleQueue[Event]) -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into events, and restores the handlers afterwards.

    Outside the main thread it does nothing, since Python installs handlers only there. A handler
    may put into a `SimpleQueue` even if it interrupts another put.
    """

    def handle(signum: int, _frame: FrameType | None) -> None:
        events.put(Signalled(signum))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signums = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup(1)
        signums.append(signal.SIGHUP)
    previous = {signum: signal.signal(signum, handle) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            if handler is not None:  # None: not installed by Python, cannot be restored
                signal.signal(signum, handler)
