"""Starts the processes of a job, watches them, and ends all of them."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, Final, NamedTuple

import psutil

from lbbsp_core.launch.cluster import JobSpec
from lbbsp_core.launch.contention import Place
from lbbsp_core.launch.cpu_shares import Stage
from lbbsp_core.launch.elsewhere import Elsewhere
from lbbsp_core.launch.output import Output
from lbbsp_core.launch.throttle import Throttle
from lbbsp_core.processes import _reaper, child
from lbbsp_core.processes.child import Reaper, signal_group, signal_name, spawn_python
from lbbsp_core.runtime.reliability.exit import LEFT
from lbbsp_core.runtime.reliability.marks import (
    WorkerMarks,
    folder_variable,
    note_failed,
    read_marks,
)

CONSEQUENCE_SECONDS: Final = 0.2  # within which workers fail because of the first failure
CLEANUP_SECONDS: Final = 0.5  # for the helpers of workers that ended normally
TERM_SECONDS: Final = 3.0
KILL_SECONDS: Final = 3.0
POLL_SECONDS: Final = 0.05
MARKS_SECONDS: Final = 1.0  # between two looks at the marks of the workers
NOTICE_SECONDS: Final = 1.0  # between two looks at scripts that leave; after one, it is reported
TIMED_OUT: Final = 124  # as for timeout(1)


class Outcome(NamedTuple):
    """Result of a job, or of one attempt of it."""

    status: int
    message: str | None = None  # to the user
    signalled: bool = False  # a signal asked the launcher to end the job
    leaving: bool = False  # the scripts end by themselves, with a checkpoint, if they get some time
    lost_workers: tuple[int, ...] = ()  # ranks of those that caused the end, as far as known


class Supervisor:
    """Runs the processes of one attempt of a job, which started on the monotonic clock."""

    def __init__(
        self,
        throttle: Throttle,
        reaper: Reaper,
        output: Output,
        events: SimpleQueue[child.Event],
        started: float,
    ) -> None:
        self._throttle, self._reaper, self._output = throttle, reaper, output
        self._events, self._started = events, started
        self._lock = threading.Lock()
        self._workers: list[child.ChildProcess] = []
        self._helpers: list[child.ChildProcess] = []
        self._first_failed: child.ChildProcess | None = None
        self._succeeded = False
        self._is_whole = True  # no worker is started by another launcher
        self._folder = Path(tempfile.mkdtemp(prefix="lbbsp-launch-"))
        self._reaper.watch("job", self._folder)

    def start(
        self,
        command: Sequence[str],
        job: JobSpec,
        places: Sequence[Place],
        only: int | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """Starts the workers with their neighbours, and helpers, which are not slowed down.

        With `only`, the rank of a worker, it starts this one and the helpers beside it; with
        `elsewhere` all on other hosts.
        """
        cgroups, workers = self._throttle.cgroups(), len(job.workers)
        for cgroup in cgroups:
            self._reaper.watch("cgroup", cgroup)
        ranks = range(workers) if only is None else [only]
        self._is_whole = only is None
        beside = itertools.count(workers)  # indices of the processes beside the workers

        def start(
            index: int, name: str, arguments: Sequence[str], environment: Mapping[str, str],
            worker: int, *place: Any,
        ) -> child.ChildProcess:  # fmt: skip
            is_worker = index == worker
            output = self._output.of(name, index if is_worker else None)
            if elsewhere is not None:
                name = f"{name} on {elsewhere.hosts.names[worker]}"
                arguments = elsewhere.command(arguments, environment, worker, is_worker=is_worker)
            return self._start(index, name, arguments, environment, output, *place)

        for helper, index in zip(job.helpers, beside, strict=False):
            if helper.beside in ranks:
                self._helpers.append(start(index, *helper))
        for rank in ranks:
            place, name = places[rank], f"worker {rank}"
            bound = cgroups[rank::workers], place.cores
            worker = start(rank, name, command, job.workers[rank], rank, *bound)
            self._workers.append(worker)
            self._throttle.attach(rank, worker.pid)
            now, name = time.monotonic(), f"neighbour of {name}"
            for number in range(place.neighbours):
                file = self._folder / f"neighbour-{rank}-{number}.json"
                compete = place.command(number, file, now, self._started)
                index, output = next(beside), child.discard
                self._helpers.append(self._start(index, name, compete, os.environ, output, *bound))

    def _start(
        self,
        index: int,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: child.Output,
        cgroups: Sequence[Path] = (),
        cores: Collection[int] = (),
    ) -> child.ChildProcess:
        marks = self._folder / str(index)
        marks.mkdir()
        variables = {**environment, _reaper.JOB: str(self._folder)}
        if self._is_whole:  # else workers that others have started must watch over each other
            variables.update(folder_variable(marks))
        process = spawn_python(command, environment=variables, cgroups=cgroups, cores=cores)
        self._reaper.watch("group", process.pid)
        return child.ChildProcess(index, name, process, output, self._events, self._lock)

    def watch(self, changes: Sequence[Stage], timeout: float | None) -> Outcome:
        """Waits for the end of the job, and changes the speeds at the scheduled times.

        The job ends when all scripts have ended, a process fails, a signal arrives, or the timeout
        has passed. Seconds count from the start of the job.
        """
        deadline = math.inf if timeout is None else self._started + timeout
        pending = deque(changes)
        # Workers that others have started may still need the processes beside this one.
        awaited = self._workers if self._is_whole else [*self._by_index().values()]
        while any(process.running for process in awaited):
            next_change = self._started + pending[0].seconds if pending else math.inf
            all_run = all(worker.running for worker in self._workers)
            next_look = math.inf if all_run else time.monotonic() + MARKS_SECONDS
            event = child.next_event(self._events, min(deadline, next_change, next_look))
            outcome = self._handle_event(event) if event is not None else self._missed_worker()
            if outcome is not None:
                return outcome
            if event is not None:
                continue
            if time.monotonic() >= deadline:
                message = f"timed out after {timeout:g} s; still running: {self._running_scripts()}"
                return Outcome(TIMED_OUT, message)
            if time.monotonic() >= next_change:
                self._throttle.apply(pending.popleft().shares)
        self._succeeded = True
        return Outcome(0)

    def wait_for_exits(
        self, outcome: Outcome, seconds: float, notify: Callable[[str], None]
    ) -> Outcome:
        """Waits until all scripts have ended by themselves, with a checkpoint if they write any.

        If this process is signalled, it asks them to. The processes beside them, on which their
        last step may depend, run on. A Ctrl-C ends the wait. Returns the outcome, whose message now
        names scripts that fail, or do not end in time.
        """
        self._release()
        started, silent, problems = time.monotonic(), True, []
        if outcome.signalled:
            for script in self._workers:
                # The scripts alone: processes that load their data must not end before them. A
                # script with a signal of its own would take ours for an order to end at once.
                if script.running and not self._marks(script).preempted:
                    os.kill(script.pid, signal.SIGTERM)  # it has not been reaped, if it has ended
        while any(script.running for script in self._workers):
            until = min(time.monotonic() + NOTICE_SECONDS, started + seconds)
            event = child.next_event(self._events, until)
            if isinstance(event, child.Exited):
                is_worker = self._mark_exited(event)
                if is_worker and event.code not in (0, LEFT, -signal.SIGTERM):
                    problems.append(str(event))
            elif isinstance(event, child.Signalled):
                if event.signum == signal.SIGINT and outcome.signalled:
                    break  # schedulers, unlike users, repeat a SIGTERM without more haste
                outcome = _signalled(event)  # the scripts know: a second request would end them
            elif time.monotonic() >= started + seconds:
                problems.append(
                    f"still running after {seconds:g} s, and now killed: {self._running_scripts()};"
                    " raise --grace if a checkpoint needs more time"
                )
                break
            elif all(self._marks(worker).waiting for worker in self._workers if worker.running):
                break  # inside the constructor of a strategy, say, which does not end by signals
            elif silent:
                silent = False
                notify(
                    f"{outcome.message}; waiting up to {seconds:g} s until the script has ended "
                    "(Ctrl-C ends it at once)"
                )
        preempted = [worker.index for worker in self._workers if self._marks(worker).preempted]
        lost = () if outcome.signalled else tuple(preempted)
        problem = f" ({'; '.join(problems)})" if problems else ""
        return outcome._replace(message=f"{outcome.message}{problem}", lost_workers=lost)

    def close(self) -> None:
        """Ends all remaining processes, by SIGTERM, then by SIGKILL, and reads their last output.

        If the job succeeded, processes that the workers have started get a moment to end; then an
        error that the output callback has raised after the last exit is raised.
        """
        self._release()
        for worker in self._workers if self._first_failed else ():
            note_failed(self._folder / str(worker.index))
        if not (self._succeeded and self._wait_until_gone(CLEANUP_SECONDS)):
            self._signal_all(signal.SIGTERM)
            if not self._wait_until_gone(TERM_SECONDS):
                self._signal_all(signal.SIGKILL)
                self._wait_until_gone(KILL_SECONDS)
        processes = self._by_index().values()
        for process in processes:
            process.reap()
        self._throttle.close()
        for process in processes:
            process.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._first_failed is not None:
            for line in self._first_failed.output_tail():
                print(f"[{_short(self._first_failed)}] {line}", file=sys.stderr)
        while self._succeeded and (event := child.next_event(self._events, 0.0)) is not None:
            if isinstance(event, child.OutputFailed):
                raise event.error

    def _release(self) -> None:
        """Lifts the limits of all workers, so that they end quickly."""
        for worker in self._workers:
            with suppress(OSError):  # a failure here must not prevent the end of the processes
                self._throttle.release(worker.index)

    def _by_index(self) -> dict[int, child.ChildProcess]:
        """Returns all processes by index: workers by rank, then the processes beside them."""
        return {process.index: process for process in (*self._workers, *self._helpers)}

    def _handle_event(self, event: child.Event) -> Outcome | None:
        """Returns the outcome that an event causes, or None if the job continues."""
        if isinstance(event, child.OutputFailed):
            raise event.error
        if isinstance(event, child.Signalled):
            return _signalled(event)
        is_worker = self._mark_exited(event)
        if event.code == 0:
            marks = self._marks(self._by_index()[event.process_index])
            if marks.finished or not marks.begun:
                return None
            return self._failed(
                event.process_index,
                f"{event.name} ended with status 0 before the end of its script: it has called "
                "os._exit, or a library that ends processes; let the script return, or use "
                "sys.exit",
            )
        if event.code == LEFT and is_worker:
            message = f"{event.name} left with status {LEFT}, as the workers do after a SIGTERM"
            return Outcome(LEFT, message, leaving=True)
        later = self._failures_within(CONSEQUENCE_SECONDS)
        message = f"{event} (followed by: {'; '.join(map(str, later))})" if later else str(event)
        for process in self._by_index().values():
            if (lost := self._marks(process).lost) is not None:
                return self._failed(lost.rank, lost.why, event.status)
        return self._failed(event.process_index, message, event.status)

    def _failed(self, process_index: int, message: str, status: int = 1) -> Outcome:
        """Returns the outcome of a job that ends because of one of its processes."""
        self._first_failed = self._by_index().get(process_index)
        workers = (process_index,) if self._first_failed in self._workers else ()
        return Outcome(status, message, lost_workers=workers)

    def _missed_worker(self) -> Outcome | None:
        """Returns the outcome if a worker waits for the start of one that has ended."""
        ended = [worker for worker in self._workers if not worker.running]
        for worker in self._workers if ended else ():
            if worker.running and self._marks(worker).waiting:
                return self._failed(
                    ended[0].index,
                    f"{ended[0].name} ended with status 0 before training, and {worker.name} "
                    "waits for it",
                )
        return None

    def _marks(self, process: child.ChildProcess) -> WorkerMarks:
        return read_marks(self._folder / str(process.index))

    def _mark_exited(self, event: child.Exited) -> bool:
        """Notes the end of a process, and returns whether it is a worker."""
        process = self._by_index()[event.process_index]
        process.running = False
        if process in self._workers:
            self._throttle.release(process.index)
        return process in self._workers

    def _failures_within(self, seconds: float) -> list[child.Exited]:
        """Returns the processes that fail shortly after the first failure, as its consequence."""
        until, failures = time.monotonic() + seconds, []
        while any(process.running for process in self._by_index().values()):
            event = child.next_event(self._events, until)
            if not isinstance(event, child.Exited):
                break
            self._mark_exited(event)
            if event.code != 0:
                failures.append(event)
        return failures

    def _running_scripts(self) -> str:
        return ", ".join(_short(script) for script in self._workers if script.running)

    def _signal_all(self, signum: signal.Signals) -> None:
        """Signals each process once: a second SIGTERM would interrupt what the first one began."""
        groups = {process.pid for process in self._by_index().values()}
        for group in groups:
            signal_group(group, signum)
            signal_group(group, signal.SIGCONT)  # a stopped process would not end
        for pid in _reaper.processes_of(str(self._folder)):
            with suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) not in groups:
                    os.kill(pid, signum)

    def _wait_until_gone(self, seconds: float) -> bool:
        """Returns whether all processes end in time; a second signal ends the wait."""
        until = time.monotonic() + seconds
        while self._alive():
            event = child.next_event(self._events, min(until, time.monotonic() + POLL_SECONDS))
            if isinstance(event, child.Signalled) or time.monotonic() >= until:
                return False
        return True

    def _alive(self) -> bool:
        """Returns whether any process of the job is alive; zombies are not."""
        groups = {process.pid for process in self._by_index().values()}
        for pid in psutil.pids():
            with suppress(ProcessLookupError, PermissionError, psutil.Error):
                in_group = os.getpgid(pid) in groups
                if in_group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    return True
        return bool(_reaper.processes_of(str(self._folder)))


def _signalled(event: child.Signalled) -> Outcome:
    message = f"ended by {signal_name(event.signum)}"
    return Outcome(128 + event.signum, message, signalled=True, leaving=True)


def _short(process: child.ChildProcess) -> str:
    """Returns the rank of a worker, or the name of another process."""
    return process.name.removeprefix("worker ")


@contextmanager
def signal_handlers(events: SimpleQueue[child.Event]) -> Iterator[list[int]]:
    """Turns SIGINT, SIGTERM and SIGHUP into events, and restores the handlers afterwards.

    Yields the signals that have arrived, in order. Outside the main thread, where Python installs
    no handlers, there are none.
    """
    received: list[int] = []

    def handle(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)  # a SimpleQueue admits a put that interrupts another one
        events.put(child.Signalled(signum))

    signums = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup(1)
        signums.append(signal.SIGHUP)
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handle) for number in signums if is_main}
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            if handler is not None:  # None: not installed by Python, cannot be restored
                signal.signal(signum, handler)
