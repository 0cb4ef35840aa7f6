"""Launcher of local worker processes, optionally with emulated unequal speeds and restarts.

command, speeds ──> environments, CPU shares ──> processes under CPU quotas ──> one exit status
                         ^                                                            │
                         └───────────── restart: new cluster, all or survivors <──────┘
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from lbbsp_core.launch.cluster import job_spec
from lbbsp_core.launch.contention import Contention, Phase, check_contention, own_cores, places
from lbbsp_core.launch.cpu_shares import schedule
from lbbsp_core.launch.devices import assign_devices
from lbbsp_core.launch.restart import Attempt, RestartLimits, check_limits, run_attempts
from lbbsp_core.launch.script import check_command
from lbbsp_core.launch.supervise import Outcome, Supervisor, signal_handlers
from lbbsp_core.launch.throttle import Emulation, available_cores, create_throttle
from lbbsp_core.processes.child import Event, Reaper
from lbbsp_core.validate import require_integer

__all__ = ["Contention", "Phase", "launch"]

GRACE_SECONDS: Final = 30.0  # as schedulers give to jobs that they end (Kubernetes, Slurm)


def launch(
    command: Sequence[str],
    *,
    workers: int,
    speeds: Sequence[float] | None = None,
    speeds_at: Sequence[tuple[float, Sequence[float]]] = (),
    run_dir: Path | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
    elastic: int | None = None,
    grace: float = GRACE_SECONDS,
    framework: str = "tensorflow",
    servers: int | None = None,
    output: Callable[[int, str], None] | None = None,
    emulation: Emulation = "auto",
    contention: Contention | None = None,
    devices: str | Sequence[str] | None = None,
) -> int:
    """Runs a script as a job of local worker processes and waits for its end.

    The first worker that fails ends the job, or this attempt of it: then all processes are started
    again, as often as ``max_restarts`` permits. The environment variable LBBSP_RESTART tells the
    script how often that has happened. No process and no cgroup outlives the call.

    A signal that asks this process to end is passed on to the scripts as SIGTERM, and they get
    ``grace`` seconds to write a checkpoint. They get as much time if one of them leaves with status
    143, as all do together after a SIGTERM to one of them; a restart follows if one is left.

    With ``speeds``, worker i gets ``speeds[i] / speeds[j]`` times the CPU time of worker j, and all
    workers together get no more than the machine has.

    Args:
        command: The script and its arguments, or "-m", a module and its arguments. This Python
            runs it in every worker.
        workers: Number of workers, >= 1.
        speeds: Relative speeds, one per worker, > 0. None emulates no speeds.
        speeds_at: Pairs of seconds since the start and the speeds from then on.
        run_dir: Folder of the run's files. It is created, and passed to the workers as
            LBBSP_RUN_DIR.
        timeout: Seconds for the whole job with its restarts, > 0. None sets no limit.
        max_restarts: Maximum number of restarts after failures.
        elastic: Minimum number of workers; the job is then restarted without a worker that has
            failed, as long as so many remain, with ranks and options of the survivors. None
            restarts all workers.
        grace: Seconds that scripts have to end after SIGTERM, >= 0.
        framework: Framework whose cluster description the workers get: "tensorflow" or "mxnet".
        servers: Number of parameter servers of mxnet, >= 1; by default 1.
        output: Called with the rank and each line of a script's output, from threads, one call at
            a time. By default the line is printed as ``[rank] line``.
        emulation: Mechanism that slows workers down: "cgroup" (CPU quotas), "duty-cycle"
            (stopping and continuing them), or "auto" (quotas where they are permitted).
        contention: Schedules of the processes that compete with each worker for its core, see
            `Phase`, by worker number modulo their number. A schedule starts with its worker. With
            more workers than cores, each worker gets a CPU quota, by default all the same. None
            starts no such processes.
        devices: GPUs of each worker, as values of CUDA_VISIBLE_DEVICES: "0,1,2" or ["0", "1", "2"]
            gives each of three workers one, "0+1,2+3" each of two workers two, "0,none" the second
            worker none, except with TensorFlow's collectives. "none" hides the GPUs from all
            workers; "all" leaves the variable alone. By default worker i gets GPU i modulo their
            number, or its part of the user's CUDA_VISIBLE_DEVICES; a worker keeps its GPU in
            restarts. Processes beside the workers get no GPU.

    Returns:
        0 if all workers succeeded; the exit status of the first that failed, or 128 + the signal
        that ended it, in the last attempt; 124 after a timeout; 130 after Ctrl-C, 143 after
        SIGTERM.

    Raises:
        ValueError: An argument is invalid, or there is no such script; then no process has been
            started.
    """
    started = time.monotonic()
    _check(command, workers, timeout, grace)
    limits = RestartLimits(max_restarts, elastic)
    check_limits(limits, workers)
    cores: Sequence[int] = ()
    if contention is not None:
        check_contention(contention)
        cores = own_cores(workers)
        speeds = speeds if speeds is not None or cores else [1.0] * workers
    plan = None
    if speeds is not None:
        plan = schedule(speeds, speeds_at, workers=workers, cores=available_cores())
    elif speeds_at:
        raise ValueError(
            f"speeds_at = {list(speeds_at)} needs the speeds at the start: give speeds as well, "
            f"such as {[1] * workers}"
        )
    emulated = plan is not None or contention is not None
    may_mix = framework != "tensorflow"
    gpus = assign_devices(devices, workers, emulated=emulated, may_mix=may_mix)
    check_command(command)
    if gpus is not None and gpus.note is not None:
        notify(gpus.note)
    events: SimpleQueue[Event] = SimpleQueue()

    def run(attempt: Attempt) -> Outcome:
        job = job_spec(
            framework,
            len(attempt.members),
            emulated=emulated,
            run_dir=run_dir,
            servers=servers,
            restart=attempt.number,
            workers_at_first=workers,
            devices=None if gpus is None else [gpus.environments[i] for i in attempt.members],
        )
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
        shares = None if plan is None else plan.of(attempt.members)
        changes = () if shares is None else shares.stages[1:]
        placed = places(contention, attempt.members, shares, cores)
        outcome = None
        with closing(Reaper()) as reaper:
            throttle = create_throttle(shares, emulation, notify, contended=contention is not None)
            supervisor = Supervisor(throttle, reaper, output or _print_line, events, started)
            try:
                supervisor.start(command, job, placed)
                outcome = supervisor.watch(changes, timeout)
                if outcome.leaving:
                    outcome = supervisor.let_leave(outcome, grace, notify)
            finally:
                supervisor.stop(succeeded=outcome is not None and outcome.status == 0)
        if outcome.status == 0:
            supervisor.check_output()
        return outcome

    with signal_handlers(events) as signals:
        return run_attempts(run, workers, limits, events, signals, notify)


def _check(command: Sequence[str], workers: int, timeout: float | None, grace: float) -> None:
    if isinstance(command, str) or not command:
        raise ValueError(
            f"command must be a script and its arguments, got {command!r}: "
            "give a list such as ['train.py', '--epochs', '5']"
        )
    require_integer("workers", workers, 1)
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(
            f"timeout must be a positive number of seconds, got {timeout}: "
            "give one, or leave it out for no limit"
        )
    if not (math.isfinite(grace) and grace >= 0):
        raise ValueError(
            f"grace must be a number of seconds >= 0, got {grace}: give the time that a script "
            "needs to write a checkpoint, such as 30"
        )


def _print_line(rank: int, line: str) -> None:
    """Prints a line in one write, whatever the encoding of our output."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(f"[{rank}] {line}\n".encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def notify(text: str) -> None:
    """Prints a message of the launcher itself to standard error."""
    print(f"lbbsp launch: {text}", file=sys.stderr, flush=True)
