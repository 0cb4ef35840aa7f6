"""Launcher of local worker processes, optionally with emulated unequal speeds.

command, speeds ──> environments, CPU shares ──> processes under CPU quotas ──> one exit status
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

from lbbsp_core.launch.cluster import JobSpec, job_spec
from lbbsp_core.launch.cpu_shares import Schedule, schedule
from lbbsp_core.launch.supervise import Outcome, Supervisor, signal_handlers
from lbbsp_core.launch.throttle import (
    Emulation,
    Throttle,
    Unthrottled,
    available_cores,
    create_throttle,
)
from lbbsp_core.processes.child import Event, Output
from lbbsp_core.processes.reaper import Reaper

__all__ = ["launch"]


def launch(
    command: Sequence[str],
    *,
    workers: int,
    speeds: Sequence[float] | None = None,
    speeds_at: Sequence[tuple[float, Sequence[float]]] = (),
    run_dir: Path | None = None,
    timeout: float | None = None,
    framework: str = "tensorflow",
    servers: int | None = None,
    output: Callable[[int, str], None] | None = None,
    emulation: Emulation = "auto",
) -> int:
    """Runs a script as a job of local worker processes and waits for its end.

    The first worker that fails ends the job. No process and no cgroup outlives the call. With
    ``speeds``, worker i gets ``speeds[i] / speeds[j]`` times the CPU time of worker j, and all
    workers together get no more than the machine has.

    Args:
        command: The script and its arguments. This Python runs it in every worker, or once where
            tensorflow has servers.
        workers: Number of workers, >= 1.
        speeds: Relative speeds, one per worker, > 0. None emulates no speeds.
        speeds_at: Pairs of seconds since the start and the speeds from then on.
        run_dir: Folder of the run's files. It is created, and passed to the workers as
            LBBSP_RUN_DIR.
        timeout: Seconds for the whole job, > 0. None sets no limit.
        framework: Framework whose cluster description the workers get: "tensorflow" or "mxnet".
        servers: Number of parameter servers, >= 1. The default is 1 for mxnet. For tensorflow the
            default is none, with synchronous training; with servers the script runs once, as the
            chief of a ``ParameterServerStrategy``, and the workers execute its requests.
        output: Called with the rank (a chief's is 0) and each line of a script's output, from
            threads, one call at a time. By default the line is printed as ``[rank] line``, or
            ``[chief] line``.
        emulation: Mechanism that slows workers down: "cgroup" (CPU quotas), "duty-cycle"
            (stopping and continuing them), or "auto" (quotas where they are permitted).

    Returns:
        0 if all workers succeeded; the exit status of the first that failed, or 128 + the signal
        that ended it; 124 after a timeout; 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        ValueError: An argument is invalid; then no process has been started.
    """
    started = time.monotonic()
    _check(command, workers, timeout)
    plan = _plan(speeds, speeds_at, workers)
    job = job_spec(framework, workers, emulated=plan is not None, run_dir=run_dir, servers=servers)
    if run_dir is not None:
        run_dir.mkdir(parents=True, exist_ok=True)
    if output is None:
        output = print_line if job.coordinator is None else _print_line_of_chief
    outcome, output_tail = _run(command, job, plan, emulation, output, started, timeout)
    for line in output_tail:
        print(f"[{outcome.failed_name}] {line}", file=sys.stderr)
    if outcome.message is not None:
        notify(outcome.message)
    return outcome.status


def _run(
    command: Sequence[str],
    job: JobSpec,
    plan: Schedule | None,
    emulation: Emulation,
    output: Output,
    started: float,
    timeout: float | None,
) -> tuple[Outcome, list[str]]:
    """Runs the job. Returns its outcome and the last output of the process that failed first."""
    events: SimpleQueue[Event] = SimpleQueue()
    with signal_handlers(events), closing(Reaper()) as reaper:
        supervisor = Supervisor(_create_throttle(plan, emulation), reaper, output, events)
        outcome = None
        try:
            supervisor.start(command, job)
            changes = plan.stages[1:] if plan is not None else ()
            outcome = supervisor.watch(changes, started, timeout)
        finally:
            supervisor.stop(succeeded=outcome is not None and outcome.status == 0)
        if outcome.failed_index is not None:
            return outcome, supervisor.output_tail(outcome.failed_index)
        if outcome.status == 0:
            supervisor.check_output()
        return outcome, []


def _check(command: Sequence[str], workers: int, timeout: float | None) -> None:
    if isinstance(command, str) or not command:
        raise ValueError(
            f"command must be a script and its arguments, got {command!r}: "
            "give a list such as ['train.py', '--epochs', '5']"
        )
    if workers != int(workers) or workers < 1:
        raise ValueError(f"workers must be an integer >= 1, got {workers!r}: start at least one")
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(
            f"timeout must be a positive number of seconds, got {timeout}: "
            "give one, or None for no limit"
        )


def _plan(
    speeds: Sequence[float] | None,
    speeds_at: Sequence[tuple[float, Sequence[float]]],
    workers: int,
) -> Schedule | None:
    """Returns the CPU shares of all stages, or None if no speeds are emulated."""
    if speeds is not None:
        return schedule(speeds, speeds_at, workers=workers, cores=available_cores())
    if speeds_at:
        raise ValueError(
            f"speeds_at = {list(speeds_at)} needs the speeds at the start: give speeds as well, "
            f"such as {[1] * workers}"
        )
    return None


def _create_throttle(plan: Schedule | None, emulation: Emulation) -> Throttle:
    if plan is None:
        return Unthrottled()
    return create_throttle(emulation, plan.stages[0].shares, plan.period_us, notify)


def print_line(source: int | str, line: str) -> None:
    """Prints a line of a rank or of "chief" in one write, whatever the encoding of our output."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(f"[{source}] {line}\n".encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def _print_line_of_chief(_rank: int, line: str) -> None:
    print_line("chief", line)


def notify(text: str) -> None:
    """Prints a message of the launcher itself to standard error."""
    print(f"lbbsp launch: {text}", file=sys.stderr, flush=True)
