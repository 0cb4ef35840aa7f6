"""Starts the workers, watches over them, and leaves nothing behind."""

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

from lbbsp_core.launch.cluster import Cluster
from lbbsp_core.launch.cpu_shares import Stage
from lbbsp_core.launch.throttle import Throttle
from lbbsp_core.processes.child import Broken, Event, Exited, Output, Signalled, Worker, signal_name
from lbbsp_core.processes.reaper import Guard

GRACE_SECONDS: Final = 0.2  # others that fail in the wake of the first do so within moments
FAREWELL_SECONDS: Final = 0.5  # for what well-behaved workers' helpers still have to tidy up
TERM_SECONDS: Final = 3.0
KILL_SECONDS: Final = 3.0
POLL_SECONDS: Final = 0.05
TIMED_OUT: Final = 124  # as timeout(1) has it


class Outcome(NamedTuple):
    """The exit status of the job, whose last words to repeat, and what there is to say.

    The culprit is a place in the list of processes: a worker's is its rank.
    """

    status: int
    culprit: int | None = None
    message: str | None = None
    culprit_name: str = ""


class Supervisor:
    """The workers of one job.

    Args:
        throttle: what holds them back.
        guard: ends them if we are killed.
        output: given the rank and each line, one call at a time.
        events: where signals arrive, and the ends of workers.
    """

    def __init__(
        self, throttle: Throttle, guard: Guard, output: Output, events: SimpleQueue[Event]
    ) -> None:
        self._throttle, self._guard, self._output = throttle, guard, output
        self._events = events
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._helpers: list[Worker] = []
        self._scripts: list[Worker] = []

    def start(self, command: Sequence[str], cluster: Cluster) -> None:
        """Start one worker per environment, and what runs beside them, which is not held back.

        A coordinator's script is the only one: its output counts as that of rank 0.
        """
        cgroups = self._throttle.cgroups()
        for cgroup in cgroups:
            self._guard.watch_cgroup(cgroup)
        for helper in cluster.helpers:
            place = len(cluster.workers) + len(self._helpers)
            self._helpers.append(self._start(place, *helper, None, _say_nothing))
        alike = cluster.coordinator is None
        role = (command, self._output) if alike else (cluster.serve, _say_nothing)
        for rank, environment in enumerate(cluster.workers):
            procs = cgroups[rank] / "cgroup.procs" if cgroups else None
            worker = self._start(rank, f"worker {rank}", role[0], environment, procs, role[1])
            self._workers.append(worker)
            self._throttle.attach(rank, worker.pid)
        if cluster.coordinator is None:
            self._scripts = self._workers
        else:
            place, say = len(self._all()), lambda _, line: self._output(0, line)
            chief = self._start(place, "chief", command, cluster.coordinator, None, say)
            self._helpers.append(chief)
            self._scripts = [chief]

    def _start(
        self,
        place: int,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        procs: Path | None,
        output: Output,
    ) -> Worker:
        worker = Worker(place, name, command, environment, procs, output, self._events, self._lock)
        self._guard.watch_group(worker.pid)
        return worker

    def watch(self, changes: Sequence[Stage], started: float, timeout: float | None) -> Outcome:
        """Wait for the end, whatever comes first, and change the speeds when it is time.

        Args:
            changes: in time order; their seconds count from ``started``.
            started: a reading of the monotonic clock.
            timeout: seconds from ``started`` on; None waits for as long as it takes.
        """
        deadline = started + timeout if timeout is not None else None
        due = deque(changes)
        while any(script.running for script in self._scripts):
            alarm = started + due[0].seconds if due else None
            event = self._next_event(_earliest(deadline, alarm))
            if event is not None:
                outcome = self._judge(event)
                if outcome is not None:
                    return outcome
            elif deadline is not None and time.monotonic() >= deadline:
                return Outcome(TIMED_OUT, None, self._overdue(timeout))
            elif alarm is not None and time.monotonic() >= alarm:
                self._throttle.apply(due.popleft().shares)
        return Outcome(0)

    def end(self, *, patient: bool) -> None:
        """End every process that is left, the gentle way first, and read the last of the output.

        Args:
            patient: the job went well: let what the workers started end by itself.
        """
        for worker in self._workers:
            with suppress(OSError):  # whatever happens here, what follows must
                self._throttle.release(worker.rank)
        if not (patient and self._gone_within(FAREWELL_SECONDS)):
            self._signal_all(signal.SIGTERM)
            if not self._gone_within(TERM_SECONDS):
                self._signal_all(signal.SIGKILL)
                self._gone_within(KILL_SECONDS)
        for process in self._all():
            process.reap()
        self._throttle.close()
        for process in self._all():
            process.close()

    def check_output(self) -> None:
        """Raise what the output raised after the last worker had ended."""
        while (event := self._next_event(0.0)) is not None:
            if isinstance(event, Broken):
                raise event.error

    def last_words(self, place: int) -> list[str]:
        """The end of a process's output."""
        return self._all()[place].last_words()

    def _all(self) -> list[Worker]:
        """Every process by its place: workers by rank, then what runs beside them."""
        return [*self._workers, *self._helpers]

    def _next_event(self, until: float | None) -> Event | None:
        try:
            return self._events.get(timeout=_remaining(until))
        except Empty:
            return None

    def _judge(self, event: Event) -> Outcome | None:
        """What an event means for the job; None: go on."""
        if isinstance(event, Broken):
            raise event.error
        if isinstance(event, Signalled):
            return Outcome(128 + event.signum, None, f"ended by {signal_name(event.signum)}")
        self._note(event)
        if event.code == 0:
            return None
        others = self._failing_within(GRACE_SECONDS)
        after = f" (then also: {'; '.join(map(str, others))})" if others else ""
        return Outcome(event.status, event.rank, f"{event}{after}", _short(event.name))

    def _note(self, event: Exited) -> None:
        self._all()[event.rank].running = False
        if event.rank < len(self._workers):
            self._throttle.release(event.rank)

    def _failing_within(self, seconds: float) -> list[Exited]:
        """The workers that fail in the wake of the first one."""
        until, others = time.monotonic() + seconds, []
        while isinstance(event := self._next_event(until), Exited):
            self._note(event)
            if event.code != 0:
                others.append(event)
        return others

    def _overdue(self, timeout: float | None) -> str:
        names = ", ".join(_short(script.name) for script in self._scripts if script.running)
        return f"timed out after {timeout:g} s; still running: {names}"

    def _signal_all(self, signum: signal.Signals) -> None:
        for process in self._all():
            process.signal_group(signum)

    def _gone_within(self, seconds: float) -> bool:
        """Whether all processes end in time; a second Ctrl-C cuts the waiting short."""
        until = time.monotonic() + seconds
        while self._alive():
            event = self._next_event(min(until, time.monotonic() + POLL_SECONDS))
            if isinstance(event, Signalled) or time.monotonic() >= until:
                return False
        return True

    def _alive(self) -> bool:
        """Whether any process of the workers' groups still lives. The dead but unreaped do not."""
        groups = {process.pid for process in self._all()}
        return any(_group(pid) in groups and not _is_zombie(pid) for pid in psutil.pids())


def _say_nothing(place: int, line: str) -> None:
    """What helpers say is only told as the last words of one that failed."""


def _short(name: str) -> str:
    """A worker's rank, another process's name."""
    return name.removeprefix("worker ")


def _group(pid: int) -> int | None:
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
    return min((each for each in times if each is not None), default=None)


def _remaining(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


@contextmanager
def handlers(events: SimpleQueue[Event]) -> Iterator[None]:
    """Turn signals that ask us to end into events, then restore what there was. Main thread only.

    The queue is one that a handler may put into, even in the middle of another put.
    """

    def handle(signum: int, _frame: FrameType | None) -> None:
        events.put(Signalled(signum))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored: nohup(1) asked for it
        wanted.append(signal.SIGHUP)
    previous = {signum: signal.signal(signum, handle) for signum in wanted}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            if handler is not None:  # None: not installed from Python, out of our reach
                signal.signal(signum, handler)
